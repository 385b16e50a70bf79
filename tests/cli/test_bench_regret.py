"""`bench regret`: the planner on random cases."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest
from in_process import Command

from specbranch.lab.regret import case


@pytest.fixture
def few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases of two requests, one at a time."""
    monkeypatch.setattr(case, "REQUESTS", 2)
    monkeypatch.setattr(case, "BATCH_SIZES", (1,))


@pytest.mark.slow
def test_two_cases_print_one_json_object(command: Command, few_requests: None) -> None:
    done = command("bench", "regret", "--cases", "2", "--jobs", "1", "--half", "report", "--methods", "auto", "--json")
    (found,) = done.answers()
    assert [one["seed"] for one in found["cases"]] == [1, 3] and found["half"] == "report"
    assert set(found["methods"]) == {"auto"}
    assert set(found["methods"]["auto"]) == {"cold", "warm", "plain"}
    assert {"plain", "lookup", "speculative-2", "speculative-5", "speculative-10", "tree", "auto"} <= set(
        found["cases"][0]["seconds"]
    )


def test_one_case_is_shown_in_full(command: Command, few_requests: None) -> None:
    done = command("bench", "regret", "--show", "4", "--methods", "specbranch")
    assert done.code == 0, done.err
    for words in (
        "Case 4",
        "draft_share",
        "agreement / lookup",
        "speculative-10",
        "specbranch: cold",
        "best arm there",
    ):
        assert words in done.out


def test_a_fixed_method_is_refused_before_anything_runs(command: Command) -> None:
    done = command("bench", "regret", "--methods", "lookup")
    assert done.code == 2 and "methods that plan" in done.err


@pytest.mark.slow
def test_several_processes_find_what_one_finds() -> None:
    # Both in processes of their own: the fixtures of this one shorten rehearsals.
    words = [sys.executable, "-m", "specbranch", "bench", "regret", "--cases", "2", "--seed", "4"]
    alone, together = (
        json.loads(subprocess.check_output([*words, "--methods", "specbranch", "--json", "--jobs", jobs]))
        for jobs in ("1", "2")
    )
    assert alone["cases"] == together["cases"]


@pytest.mark.slow
@pytest.mark.parametrize("after", [2.0, 6.0])  # seconds: while the processes start, and while they work
def test_an_interrupt_ends_all_processes(after: float) -> None:
    words = [sys.executable, "-m", "specbranch", "bench", "regret", "--cases", "200", "--jobs", "2"]
    running = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    time.sleep(after)
    try:
        os.killpg(running.pid, signal.SIGINT)
        _, said = running.communicate(timeout=30)  # ends once every process has closed its end of the pipes
    finally:
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
    assert running.returncode == 130 and said.strip() == "Interrupted."
