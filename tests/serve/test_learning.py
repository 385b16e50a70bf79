"""From requests to a better draft without a pause: a server keeps texts, the draft learns on, the server takes it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from running import Running, running

from specbranch import LLM
from specbranch.cli.main import run
from specbranch.kept_text import read_kept
from specbranch.serve.keys import new_key

COMPLETE = "/v1/completions"
TOKENS = 30


def report(number: int) -> str:
    """A prompt of a kind of its own."""
    rng = random.Random(number)
    fields = [f"{name}: {rng.randint(10, 99)}" for name in ("pressure", "heat", "flow", "level")]
    return f"## Report {number}\n" + "\n".join(rng.sample(fields, 4)) + "\nSummary:"


def asked(server: Running, numbers: range, **more: Any) -> tuple[list[str], float]:
    """Answer reports; return the texts, and the tokens a forward of the target."""
    texts, forwards = list[str](), 0
    for few in (numbers[at : at + 8] for at in range(0, len(numbers), 8)):
        body = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, "prompt": list(map(report, few)), **more}
        answer = server.post(COMPLETE, body).json()
        forwards += answer["metrics"]["speculative_decoding"]["num_spec_steps"]
        texts += [one["text"] for one in answer["choices"]]
    return texts, TOKENS * len(numbers) / forwards


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_server_that_keeps_text_takes_the_draft_that_has_learned_from_it(
    pair: tuple[str, str], tiny_draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, admins, new = tmp_path / "kept", tmp_path / "admins.txt", tmp_path / "new"
    key = {"authorization": f"Bearer {new_key(admins, 'root')}"}
    llm = LLM(pair[0], str(tiny_draft), "speculative", device="cpu", options={"context_length": 256})
    with running(llm, keep_text=kept, admin_keys=admins) as server:
        asked(server, range(40))
        others = range(1000, 1008)
        before, slow = asked(server, others, store=False)
        training = ["--steps", "100", "--rows", "4", "--length", "128", "--learning-rate", "0.002", "--device", "cpu"]
        named = ["--from-served", str(kept), "--resume", str(tiny_draft), "--target", pair[0], "--out", str(new)]
        assert run(["distill", *named, *training, "--json"]) == 0  # the server goes on meanwhile
        found = json.loads(capsys.readouterr().out.splitlines()[-1])["agreement"][0]
        taken = server.post("/admin/draft", {"draft": str(new)}, **key)
        assert taken.status_code == 200, taken.text
        after, quick = asked(server, others, store=False)
        plain, _ = asked(server, others, store=False, speculative=False)
    assert before == after == plain
    assert found["kind"] == "served" and found["after"]["top1"] > found["before"]["top1"]
    assert quick > slow
    assert len(list(read_kept(kept))) == 40
