"""This machine's profile is measured as the pair is run."""

from __future__ import annotations

import pytest

from specbranch.errors import BadParameter
from specbranch.lab.bench import clocks
from specbranch.lab.bench.clocks import machine_clock
from specbranch.lab.bench.pair_setup import Running
from specbranch.lab.measure.probes import Effort


@pytest.mark.slow
def test_a_pair_is_measured_by_the_executor_that_runs_it(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clocks, "BRIEFLY", Effort(repeats=1, least=1, rows=(1, 2), far=False, host_tokens=4))
    made = machine_clock(*pair, "tiny", Running(device="cpu")).profile
    assert made is not None and made.pair == "tiny" and not made.overlap and [rows for rows, _ in made.target] == [1, 2]
    with pytest.raises(BadParameter, match="Executor 'streams' drafts while the target works by itself on a GPU"):
        machine_clock(*pair, "tiny", Running(executor="streams", device="cpu"))
