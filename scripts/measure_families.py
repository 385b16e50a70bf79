"""Time and check a GPU's steps of model families, with random weights of their shapes.

A case is a shape, what its weights are stored as, and the context before the rows: 30b-a3b, gpt-oss-20b:int8,
8b@131072. Each runs in a process of its own, so that one that fails takes no other with it. Times are medians of a
graph's replay, the choice of a token included, beside the time that reading the bytes takes at the measured rate of the
memory. Checked are the bits of each of 16 rows, alone and among the others (of 16 sequences, and of one), and one row
against the plain step. `--out` takes a JSON file for each case, and all of them in families.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CASES = ("30b-a3b", "gpt-oss-20b", "gemma3-12b", "8b@32768", "8b@131072")
BARS = {"30b-a3b": 0.45, "gpt-oss-20b": 0.60, "gemma3-12b": 0.70, "8b@32768": 0.70, "8b@131072": 0.70}  # 1 row
CONTEXT, ROWS, REPLAYS = 1000, 16, 40
MOST_SECONDS = 150.0  # of one case: one that hangs must not take the time of the others
PLAIN_ERROR = 0.05  # of the greatest logit, through two layers: bfloat16 is rounded at other places


@dataclass(frozen=True)
class Case:
    """A shape, its weights, and how much text comes before the rows."""

    named: str
    shape: str
    stored: str | None
    context: int

    @classmethod
    def of(cls, named: str) -> Case:
        """Take a name apart."""
        rest, _, context = named.partition("@")
        shape, _, stored = rest.partition(":")
        if not (context or "0").isdigit():
            raise argparse.ArgumentTypeError(f"{named!r}; expected SHAPE, then :WEIGHTS, then @CONTEXT, a number")
        return cls(named, shape, stored or None, int(context or CONTEXT))


def main() -> None:
    """Measure each case in a process of its own, and print a table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("cases", nargs="*", type=Case.of, default=[Case.of(case) for case in CASES])
    options.add_argument("--out", type=Path, default=Path("families"), help="folder for the results")
    options.add_argument(
        "--seconds", type=float, default=450.0, help="no case begins later, or lasts longer, than this"
    )
    options.add_argument("--device", default="cuda", help="on a CPU nothing is captured: to try this script out")
    options.add_argument("--here", action="store_true", help="measure in this process")
    given = options.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    begin, found = time.monotonic(), list[dict[str, Any]]()
    for case in given.cases:
        left = given.seconds - (time.monotonic() - begin)
        entry = measure_here(case, given.device, given.out) if given.here else measure_apart(case, given, left)
        found.append(entry)
        (given.out / f"{file_name(case.named)}.json").write_text(json.dumps(entry, indent=1))
        print(json.dumps(entry), flush=True)
    (given.out / "families.json").write_text(json.dumps(found, indent=1))
    print_table(found)


def measure_apart(case: Case, given: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Measure a case in a process of its own, which has so many seconds left."""
    if seconds < 20:
        return {"case": case.named, "error": "no time was left; give --seconds more, or this case alone"}
    seconds = min(seconds, MOST_SECONDS)
    so_far = path_so_far(given.out, case)
    command = [sys.executable, __file__, case.named, "--here", "--device", given.device, "--out", str(given.out)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"case": case.named, **kept(so_far), "error": f"it took more than {seconds:.0f} s"}
    line = next((line for line in done.stdout.splitlines() if line.startswith("{")), None)
    if line is None:
        return {"case": case.named, **kept(so_far), "error": f"exit {done.returncode}: {done.stderr.strip()[-1500:]}"}
    found: dict[str, Any] = json.loads(line)
    return found


def path_so_far(folder: Path, case: Case) -> Path:
    """Return where a case's parts lie while it is measured."""
    return folder / f"{file_name(case.named)}.so-far.json"


def kept(path: Path) -> dict[str, Any]:
    """Return the parts that a case measured before it broke off."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    path.unlink(missing_ok=True)
    return found


def measure_here(case: Case, device: str, folder: Path) -> dict[str, Any]:
    """Measure a case; an error becomes part of the result, with what was measured before it."""
    so_far = path_so_far(folder, case)
    entry: dict[str, Any] = {"case": case.named}
    begin = time.monotonic()
    try:
        from family_steps import Measured

        for name, part in Measured(case.shape, case.stored, case.context, device).parts(ROWS, REPLAYS):
            entry |= part
            entry.setdefault("parts", []).append(f"{name} {time.monotonic() - begin:.0f} s")
            so_far.write_text(json.dumps(entry))
    except Exception as reason:  # of all kinds: compilers, memory, the device
        entry["error"] = f"{type(reason).__name__}: {str(reason)[:600]}"
    so_far.unlink(missing_ok=True)
    return {**entry, "seconds": round(time.monotonic() - begin, 1)}


def print_table(found: list[dict[str, Any]]) -> None:
    """Lay the results out for people; the bar is a share for 1 row."""
    print(f"{'case':>16} {'kernels':>8} {'1 row ms':>9} {'share':>6} {'16 ms':>8} {'share':>6}", end="")
    print("  bits (batch, chain)  plain")
    for entry in found:
        cells = [
            f"{entry['case']:>16}", f"{entry.get('kernels', '-')!s:>8}", _number(entry, "ms_1", 9, 3),
            _share(entry, "share_1"), _number(entry, "ms_16", 8, 3), _share(entry, "share_16"),
            f" {entry.get('batch_bits', '-')!s:>9} {entry.get('chain_bits', '-')!s:>9}",
            _number(entry, "plain_error", 7, 4), verdict(entry),
        ]  # fmt: skip
        print(*cells)


def verdict(entry: dict[str, Any]) -> str:
    """Return what an entry meets and misses, in words."""
    bar, share = BARS.get(entry["case"]), entry.get("share_1")
    words = [f"{'meets' if share >= bar else 'MISSES'} {bar:.0%}"] if bar is not None and share is not None else []
    words += [f"{name} DIFFER" for name in ("batch_bits", "chain_bits") if entry.get(name) is False]
    words += ["plain DIFFERS"] if entry.get("plain_error", 0.0) > PLAIN_ERROR else []
    words += [entry["error"].replace("\n", " ")[:200]] if "error" in entry else []
    return " ".join(words)


def _number(entry: dict[str, Any], name: str, width: int, digits: int) -> str:
    return f"{entry[name]:{width}.{digits}f}" if name in entry else f"{'-':>{width}}"


def _share(entry: dict[str, Any], name: str) -> str:
    return f"{entry[name]:6.1%}" if name in entry else f"{'-':>6}"


def file_name(case: str) -> str:
    """Return a case's name as a file's."""
    return case.replace(":", "-").replace("@", "-")


if __name__ == "__main__":
    main()
