"""Rows come from runs as they are defined, survive their files, and are compared with their noise in view."""

from __future__ import annotations

import csv
import io
import json
import math
import random
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_runs import PROVENANCE, run, slowed, toy_runs

from specbranch.core.orders import Branch, Verdict
from specbranch.core.stats import Stats
from specbranch.errors import BadParameter
from specbranch.lab.bench import aggregate
from specbranch.lab.bench.aggregate import Timing, accepted_lengths, half_width, interval, pooled, rows_of
from specbranch.lab.bench.compare import compare
from specbranch.lab.bench.report import report_html
from specbranch.lab.bench.results import COLUMNS, Column, ResultRow, Results, rows_csv, setting_text
from specbranch.lab.bench.run_store import PromptRun, RunStore, output_digest
from specbranch.lab.bench.table import losslessness, show, table_lines, table_text
from specbranch.provenance import Provenance

AR = "autoregressive"


def row_of(runs: list[PromptRun], method: str = "pearl") -> ResultRow:
    return next(row for row in rows_of(runs) if row.method == method)


def results(*rows: ResultRow, provenance: Provenance = PROVENANCE) -> Results:
    return Results(rows, provenance)


def made_row(**values: Any) -> ResultRow:
    given: dict[str, Any] = {
        "pair": "toy",
        "suite": "own-code",
        "method": "pearl",
        "temperature": 0.0,
        "tokens_per_second": 50.0,
        "speedup": 2.0,
    }
    more = {
        "tokens_per_forward": 2.5,
        "rollback_rate": 0.3,
        "lossless": True,
        "prompt_set": "abc",
        "spread": 0.02,
        "speedup_spread": 0.01,
        "repeats": 5,
    }
    return ResultRow(**{**given, **more, **values})


class TestAggregation:
    def test_tokens_a_second_count_decoding_alone(self) -> None:
        one = run("pearl", tokens=101, seconds=2.0, turn={"ttft_seconds": 7.0})
        row = row_of([one])
        assert row.tokens_per_second == pytest.approx(50.0)
        assert row.end_to_end_tokens_per_second == pytest.approx(101 / 9)
        assert row.ttft_seconds == 7.0

    def test_the_speedup_is_the_ratio_of_total_times_where_the_texts_agree(self) -> None:
        runs = [
            run(AR, "p1", seconds=2.0),
            run(AR, "p2", seconds=4.0),
            run("pearl", "p1", seconds=1.0),
            run("pearl", "p2", seconds=4.0),
        ]
        assert row_of(runs).speedup == pytest.approx(6 / 5)
        assert row_of(runs, AR).speedup == 1.0

    def test_where_the_texts_differ_in_length_speed_is_counted_by_the_token(self) -> None:
        runs = [run(AR, tokens=101, seconds=2.0), run("pearl", tokens=201, seconds=2.0)]
        assert row_of(runs).speedup == pytest.approx(2.0)

    def test_one_slow_repeat_does_not_change_the_figures(self) -> None:
        steady = [run(method, repeat=at, seconds=s) for at in range(3) for method, s in ((AR, 2.0), ("pearl", 1.0))]
        disturbed = [*steady[:-1], slowed(steady[-1], 50.0)]
        assert row_of(disturbed).speedup == row_of(steady).speedup == pytest.approx(2.0)

    def test_only_prompts_and_repeats_that_both_finished_are_paired(self) -> None:
        both = [run(AR, "p1", seconds=2.0), run("pearl", "p1", seconds=1.0)]
        row = row_of([*both, run("pearl", "p2", seconds=100.0), run(AR, "p3", seconds=50.0)])
        assert row.speedup == pytest.approx(2.0)
        assert row.tokens_per_second == pytest.approx(200 / 101)

    def test_without_plain_decoding_beside_it_there_is_no_speedup_and_no_verdict(self) -> None:
        row = row_of(
            [
                run("pearl"),
                run(AR, suite="own-chat"),
                run(AR, temperature=1.0),
                run(AR, clock="c10"),
                run(AR, pair="other"),
            ]
        )
        assert (row.speedup, row.speedup_low, row.lossless) == (None, None, None)

    def test_the_spread_is_half_of_the_middle_half_over_the_median(self) -> None:
        seconds = (1.0, 1.25, 1.6, 2.0, 2.5)  # rates 100, 80, 62.5, 50, 40: quartiles 50 and 80
        runs = [run(method, repeat=at, seconds=s) for at, s in enumerate(seconds) for method in (AR, "pearl")]
        row = row_of(runs)
        assert row.spread == pytest.approx((80 - 50) / 2 / 62.5)
        # a machine that slows down as a whole leaves the paired ratio alone
        assert row.speedup_spread == pytest.approx(0.0)
        assert row.repeats == 5

    def test_the_spread_of_a_single_repeat_is_unknown_by_the_wall_and_nothing_by_a_profile(self) -> None:
        assert row_of([run(AR), run("pearl")]).spread is None
        modelled = row_of([run(AR, clock="c10"), run("pearl", clock="c10")])
        assert (modelled.spread, modelled.speedup_spread) == (0.0, 0.0)
        assert half_width([], "c10") is None

    def test_a_repeat_that_was_broken_off_is_no_noise(self) -> None:
        whole = [
            run("pearl", prompt, repeat, seconds=s) for repeat in range(2) for prompt, s in (("p1", 1.0), ("p2", 9.0))
        ]
        assert row_of([*whole, run("pearl", "p1", 2, seconds=1.0)]).spread == 0.0

    def test_a_single_run_of_other_tokens_is_not_lossless_and_is_counted(self) -> None:
        runs = [run(method, f"p{at}") for at in range(3) for method in (AR, "pearl")]
        assert row_of(runs).lossless is True
        row = row_of([*runs[:-1], replace(runs[-1], output="other")])
        assert (row.lossless, row.differing) == (False, 1)

    def test_under_the_ratio_rule_nothing_is_said_about_losslessness(self) -> None:
        assert row_of([run(AR), run("pearl", rule="ratio", output="other")]).lossless is None

    def test_plain_decoding_that_disagrees_with_itself_is_not_lossless_either(self) -> None:
        row = row_of([run(AR, repeat=0), run(AR, repeat=1, output="other")], AR)
        assert (row.lossless, row.differing) == (False, 1)

    def test_one_method_in_two_settings_makes_two_rows(self) -> None:
        rows = rows_of([run(AR), run("pearl", setting={"k": 1}), run("pearl", setting={"k": 2}, seconds=0.5)])
        assert [(row.method, dict(row.setting), row.speedup) for row in rows[1:]] == [
            ("pearl", {"k": 1}, 1.0),
            ("pearl", {"k": 2}, 2.0),
        ]

    def test_an_answer_of_one_token_has_no_rate_and_spoils_none(self) -> None:
        runs = [run(method, "p1", seconds=1.0) for method in (AR, "pearl")]
        short = [run(method, "p2", tokens=1, seconds=0.0) for method in (AR, "pearl")]
        assert row_of([*runs, *short]).speedup == 1.0
        assert row_of(short).tokens_per_second is None and row_of(short).speedup is None

    def test_a_method_from_outside_with_times_alone_has_no_figures_of_drafting(self) -> None:
        row = row_of([run(AR), run("hf-generate", seconds=2.0)], "hf-generate")
        assert row.speedup == pytest.approx(0.5)
        assert (row.tokens_per_forward, row.rollback_rate, row.draft_idle, row.target_idle, dict(row.rollback)) == (
            None,
        ) * 4 + ({},)

    def test_a_row_tells_who_waits_what_is_hidden_and_how_rounds_begin(self) -> None:
        rows = rows_of(toy_runs())
        for row in rows:
            drafts_beside = row.method in ("pearl", "specbranch")
            assert row.host_share is not None and 0 < row.host_share < 0.1, (
                "the toy profile charges 0.1 of some 12 seconds a round"
            )
            assert (row.begun_with_tree is not None) == (row.begun_of_overlapped is not None) == drafts_beside
            if drafts_beside:
                assert 0 < row.draft_overlapped <= 1 and 0 < row.begun_with_tree <= row.begun_of_overlapped <= 1  # type: ignore[operator]
        assert {row.draft_overlapped for row in rows if row.method == "speculative"} == {0.0}
        text = table_text(rows)
        assert all(head in text for head in ("begun", "beside", "target idle", "draft idle", "host"))

    def test_runs_that_tell_nothing_of_spans_have_no_shares_of_them(self) -> None:
        row = row_of([run(AR), run("pearl", turn={"draft_idle_seconds": 0.2, "target_idle_seconds": 0.1})])
        assert (row.draft_overlapped, row.host_share, row.begun_with_tree, row.begun_of_overlapped) == (None,) * 4

    def test_runs_of_earlier_versions_without_accepted_counts_have_no_figures_of_positions(self) -> None:
        for one in toy_runs():
            old = [{k: v for k, v in turn.items() if k != "accepted_by_position"} for turn in one.turns]
            row, whole = rows_of([replace(one, turns=tuple(old))])[0], rows_of([one])[0]
            assert (row.accepted_lengths, row.acceptance_by_position, row.tested_by_position) == ((), (), ())
            assert (row.tokens_per_second, row.rollback_rate) == (whole.tokens_per_second, whole.rollback_rate)

    def test_toys_are_counted_as_core_counts_them(self) -> None:
        for one in toy_runs():
            row = rows_of([one])[0]
            total = pooled(one.turns)
            total.check()
            forwards = sum(turn["target_forwards"] for turn in one.turns)
            assert row.tokens_per_forward == pytest.approx(sum(turn["tokens"] - 1 for turn in one.turns) / forwards)
            assert row.tokens == sum(turn["tokens"] for turn in one.turns)
            lost = [turn["rollback"] for turn in one.turns]
            assert row.rollback.get("losing_branches", 0.0) == pytest.approx(
                sum(part["losing_branches"] for part in lost) / row.tokens
            )
            assert sum(row.accepted_lengths) == (row.tested_by_position[0] if row.tested_by_position else 0)

    def test_toys_are_lossless_and_a_row_of_a_single_request_says_what_core_says(self) -> None:
        rows = rows_of(toy_runs())
        assert all(row.lossless for row in rows) and all(row.speedup for row in rows)
        for one in toy_runs():
            row, core = rows_of([replace(one, turns=one.turns[:1])])[0], one.turns[0]
            names = (
                "tokens_per_second",
                "tokens_per_forward",
                "branch_hit_rate",
                "ttft_seconds",
                "end_to_end_tokens_per_second",
            )
            assert [getattr(row, name) for name in names] == [pytest.approx(core[name]) for name in names]
            assert row.rollback_rate == (pytest.approx(core["rollback_rate"]) if core["drafted"] else None)
            assert list(row.acceptance_by_position) == pytest.approx(core["acceptance_by_position"])

    @given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=30))
    def test_accepted_lengths_are_those_of_the_chains(self, chains: list[tuple[int, int]]) -> None:
        stats, want = Stats(), Counter[int]()
        for length, accepted in chains:
            good = min(accepted, length)
            stats.judge(Branch(0, (1,) * length, (1.0,) * length), Verdict(tuple(range(good)), 2))
            want.update([good] if length else [])
        turn = {**stats.summary(), "tokens": 10, "decode_seconds": 1.0, "ttft_seconds": 0.0}
        found = accepted_lengths(pooled([turn, turn]))
        assert {length: count for length, count in enumerate(found) if count} == {
            length: 2 * count for length, count in want.items()
        }


seconds = st.floats(0.1, 10.0)


class TestInterval:
    @settings(max_examples=30, deadline=None)
    @given(st.lists(st.tuples(seconds, seconds), min_size=2, max_size=8))
    def test_it_lies_within_the_speedups_of_single_prompts_and_is_repeatable(
        self, times: list[tuple[float, float]]
    ) -> None:
        mine, base = [Timing(100, a) for a, _ in times], [Timing(100, b) for _, b in times]
        found = interval(mine, base, draws=50)
        ratios = [b / a for a, b in times]
        assert found is not None and min(ratios) - 1e-9 <= found[0] <= found[1] <= max(ratios) + 1e-9
        assert found == interval(mine, base, draws=50)

    def test_it_is_a_point_where_all_prompts_agree_and_nothing_for_one_prompt(self) -> None:
        assert interval([Timing(100, 1.0)] * 5, [Timing(100, 2.0)] * 5) == pytest.approx((2.0, 2.0))
        assert interval([Timing(100, 1.0)], [Timing(100, 2.0)]) is None

    def test_it_covers_the_truth_about_as_often_as_it_says_and_half_of_it_does_not(self) -> None:
        draw, covered, by_half = random.Random(3), 0, 0
        for _ in range(200):
            logs = [draw.gauss(0.0, 0.3) for _ in range(16)]
            found = interval([Timing(100, math.exp(x)) for x in logs], [Timing(100, 1.0)] * 16, draws=200)
            assert found is not None
            truth, middle = 1 / math.exp(0.3**2 / 2), (found[0] + found[1]) / 2
            covered += found[0] <= truth <= found[1]
            by_half += abs(truth - middle) <= (found[1] - found[0]) / 4
        assert covered >= 174  # 87 %: the bootstrap of 16 falls a little short of 95
        assert by_half < 160


class TestFiles:
    def test_results_come_back_equal(self, tmp_path: Path) -> None:
        made = Results(rows_of(toy_runs()), PROVENANCE)
        made.save(tmp_path / "deep" / "results.json")
        assert Results.load(tmp_path / "deep" / "results.json") == made
        assert not list(tmp_path.glob("deep/.*"))  # nothing half-written is left behind

    def test_the_last_line_is_json_with_the_promised_keys(self) -> None:
        line = Results(rows_of(toy_runs()), PROVENANCE).last_line()
        assert "\n" not in line
        promised = {
            "pair",
            "suite",
            "method",
            "temperature",
            "tokens_per_second",
            "speedup",
            "tokens_per_forward",
            "rollback_rate",
            "lossless",
        }
        assert all(promised <= row.keys() for row in json.loads(line)["rows"])

    def test_csv_has_a_line_a_row_and_the_split_in_columns_of_its_own(self) -> None:
        rows = rows_of(toy_runs())
        lines = list(csv.DictReader(io.StringIO(rows_csv(rows))))
        assert [line["method"] for line in lines] == [row.method for row in rows]
        assert float(lines[4]["rollback_losing_branches"]) == pytest.approx(rows[4].rollback["losing_branches"])
        assert lines[0]["rollback_rate"] == "" and lines[1]["setting"] == "num_speculative_tokens=4"
        assert rows_csv([]).strip() == ""

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (
                '{"format": "specbranch-bench", "version": 2, "rows": []}',
                "version 2 of the results format; this specbranch reads version 1",
            ),
            ('{"format": "specbranch-bench", "rows": []}', "version None"),
            ('{"rows": []}', "holds no bench results"),
            ("[1]", "holds no bench results"),
            ("nonsense", "cannot be read"),
            ('{"format": "specbranch-bench", "version": 1, "provenance": {}}', "lacks 'rows'"),
            (
                '{"format": "specbranch-bench", "version": 1, "provenance": {}, "rows": [{"pare": 1}]}',
                "Did you mean 'pair'?",
            ),
            ('{"format": "specbranch-bench", "version": 1, "provenance": {}, "rows": [{"pair": "x"}]}', "incomplete"),
            (
                '{"format": "specbranch-bench", "version": 1, "provenance": {"comit": 1}, "rows": []}',
                "Did you mean 'commit'?",
            ),
            ('{"format": "specbranch-bench", "version": 1, "provenance": 3, "rows": []}', "expected an object"),
        ],
    )
    def test_a_file_that_is_none_of_ours_is_refused_in_words(self, tmp_path: Path, content: str, said: str) -> None:
        file = tmp_path / "results.json"
        file.write_text(content)
        with pytest.raises(BadParameter) as caught:
            Results.load(file)
        assert said in str(caught.value) and str(file) in str(caught.value)

    def test_files_of_earlier_versions_with_keys_that_are_gone_are_read(self, tmp_path: Path) -> None:
        made = results(made_row())
        values = made.to_dict()
        values["rows"][0]["peak_memory"] = None
        (tmp_path / "results.json").write_text(json.dumps(values))
        assert Results.load(tmp_path / "results.json") == made
        file = tmp_path / "runs.jsonl"
        with RunStore(file, PLAN) as store:
            store.append(run("pearl"))
        head, line = file.read_text().splitlines()
        file.write_text(f"{head}\n{json.dumps({**json.loads(line), 'peak_memory': None})}\n")
        with RunStore(file, PLAN) as store:
            assert store.runs == [run("pearl")]

    def test_a_path_that_cannot_be_written_gets_a_sentence(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(BadParameter, match="cannot be written"):
            results(made_row()).save(tmp_path / "file" / "results.json")

    def test_the_provenance_of_this_machine_is_plain_and_comes_back(self) -> None:
        found = Provenance.here(pairs={"toy": {"target": "x"}}, workload={"max_tokens": 5}, settings={}, suites={})
        assert Provenance.from_dict(json.loads(json.dumps(found.to_dict()))) == found
        assert found.hardware["cores"] >= 1 and found.made.endswith("+00:00") and "specbranch" in found.versions


PLAN = {"methods": ["pearl"], "max_tokens": 64}


class TestStore:
    def test_runs_are_there_after_opening_again(self, tmp_path: Path) -> None:
        with RunStore(tmp_path / "out" / "runs.jsonl", PLAN) as store:
            for one in toy_runs()[:5]:
                store.append(one)
        with RunStore(tmp_path / "out" / "runs.jsonl", PLAN) as again:
            assert again.runs == list(toy_runs()[:5])
            assert again.done == {one.key for one in toy_runs()[:5]}
            again.append(toy_runs()[5])
        assert len(RunStore(tmp_path / "out" / "runs.jsonl", PLAN).runs) == 6

    @settings(max_examples=40, deadline=None)
    @given(st.data())
    def test_cut_off_anywhere_it_keeps_every_whole_run_and_goes_on(self, data: st.DataObject) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file, runs = Path(folder) / "runs.jsonl", [run("pearl", f"prömpt {at}") for at in range(3)]
            with RunStore(file, PLAN) as store:
                for one in runs:
                    store.append(one)
            content = file.read_bytes()
            cut = content[: data.draw(st.integers(0, len(content)))]
            file.write_bytes(cut)
            with RunStore(file, PLAN) as store:
                assert store.runs == runs[: max(cut.count(b"\n") - 1, 0)]
                store.append(run(AR))
            with RunStore(file, PLAN) as store:
                assert store.runs[-1] == run(AR)

    def test_a_killed_process_loses_no_finished_run(self, tmp_path: Path) -> None:
        code = (
            "import os, signal, sys; from pathlib import Path; sys.path[:0] = sys.argv[2:];"
            "from made_runs import run; from specbranch.lab.bench.run_store import RunStore;"
            "store = RunStore(Path(sys.argv[1]), {});"
            "store.append(run('pearl', 'p1')); store.append(run('pearl', 'p2')); os.kill(os.getpid(), signal.SIGKILL)"
        )
        here = Path(__file__).parent
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "runs.jsonl"), str(here), str(here.parents[1])], check=False
        )
        assert done.returncode == -9
        assert [one.prompt for one in RunStore(tmp_path / "runs.jsonl", {}).runs] == ["p1", "p2"]

    def test_a_second_bench_in_the_same_folder_is_refused_while_the_first_one_writes(self, tmp_path: Path) -> None:
        with RunStore(tmp_path / "runs.jsonl", PLAN) as store:
            with pytest.raises(BadParameter, match="Another bench is writing"):
                RunStore(tmp_path / "runs.jsonl", PLAN)
            store.append(run("pearl"))
        with RunStore(tmp_path / "runs.jsonl", PLAN) as again:
            assert again.runs == [run("pearl")]

    def test_damage_in_the_middle_is_named_by_its_line(self, tmp_path: Path) -> None:
        file = tmp_path / "runs.jsonl"
        with RunStore(file, PLAN) as store:
            store.append(run("pearl"))
            store.append(run("pearl", "p2"))
        lines = file.read_text().split("\n")
        for broken in ('{"pair": "to', "7", '{"pair": "x"}', json.dumps({**asdict(run("pearl")), "colour": 1})):
            file.write_text("\n".join([lines[0], broken, lines[2], ""]))
            with pytest.raises(BadParameter, match=r"runs\.jsonl, line 2"):
                RunStore(file, PLAN)

    def test_a_file_for_another_plan_version_or_purpose_is_refused(self, tmp_path: Path) -> None:
        file = tmp_path / "runs.jsonl"
        RunStore(file, PLAN).close()
        with pytest.raises(BadParameter, match="max_tokens was 64, now 32"):
            RunStore(file, {**PLAN, "max_tokens": 32})
        file.write_text('{"format": "specbranch-bench-runs", "version": 9, "plan": {}}\n')
        with pytest.raises(BadParameter, match="version 9"):
            RunStore(file, PLAN)
        file.write_text('{"something": "else"}\n')
        with pytest.raises(BadParameter, match="not a file of bench runs"):
            RunStore(file, PLAN)
        with pytest.raises(BadParameter, match="cannot be written"):
            RunStore(file / "below" / "runs.jsonl", PLAN)

    def test_runs_of_other_models_or_charges_under_the_same_names_are_refused(self, tmp_path: Path) -> None:
        with RunStore(tmp_path / "runs.jsonl", PLAN) as store:
            one = replace(run("pearl"), models="a", clock="mine", charges="x")
            store.append(one)
            store.refuse_another(one)
            store.refuse_another(replace(one, pair="another", models="b"))
            with pytest.raises(BadParameter, match="other models under the name"):
                store.refuse_another(replace(one, models="b"))
            with pytest.raises(BadParameter, match="another cost profile named mine"):
                store.refuse_another(replace(one, charges="y"))

    def test_the_digest_of_an_output_tells_tokens_and_turns_apart(self) -> None:
        texts = [[[1, 2], [3]], [[1], [2, 3]], [[1, 2, 3]], [[12], [3]], [[1, 2], [4]]]
        assert len({output_digest(text) for text in texts}) == len(texts)
        assert output_digest([(1, 2), (3,)]) == output_digest(texts[0])


class TestCompare:
    def verdicts(self, before: ResultRow, after: ResultRow, **provenance: Any) -> tuple[str, tuple[str, ...]]:
        found = compare(results(before), results(after, provenance=replace(PROVENANCE, **provenance))).changes[0]
        return found.verdict, found.remarks

    def test_a_change_counts_only_beyond_the_joint_spread_times_the_factor_of_the_repeats(self) -> None:
        old = made_row(speedup=2.0, speedup_spread=0.03, repeats=10)
        for speedup, verdict in ((2.0, "same"), (2.13, "same"), (2.15, "faster"), (1.87, "same"), (1.85, "slower")):
            new = made_row(speedup=speedup, speedup_spread=0.04, repeats=11)  # 1.4 × √(0.03² + 0.04²) = 7 %
            assert self.verdicts(old, new)[0] == verdict
        for speedup, verdict in ((2.39, "same"), (2.41, "faster")):
            new = made_row(speedup=speedup, speedup_spread=0.04, repeats=3)  # 4 × 5 %
            assert self.verdicts(old, new)[0] == verdict

    def test_on_a_modelled_clock_any_change_is_real(self) -> None:
        exact = {"spread": 0.0, "speedup_spread": 0.0, "clock": "c10"}
        assert self.verdicts(made_row(speedup=2.0, **exact), made_row(speedup=2.001, **exact))[0] == "faster"
        assert self.verdicts(made_row(speedup=2.0, **exact), made_row(speedup=2.0 + 1e-12, **exact))[0] == "same"

    def test_without_spreads_the_intervals_decide_and_without_them_nothing_is_claimed(self) -> None:
        old = made_row(speedup=2.0, speedup_spread=None, speedup_low=1.9, speedup_high=2.1)
        assert self.verdicts(old, replace(old, speedup=2.15, speedup_low=2.05, speedup_high=2.25))[0] == "same"
        assert self.verdicts(old, replace(old, speedup=2.3, speedup_low=2.2, speedup_high=2.4))[0] == "faster"
        assert self.verdicts(old, replace(old, speedup=3.0, speedup_low=None))[0] == "unclear"
        assert self.verdicts(old, replace(old, speedup=None))[0] == "unclear"

    def test_plain_decoding_is_compared_by_its_rate(self) -> None:
        old = made_row(method=AR, speedup=1.0, tokens_per_second=50.0)
        assert self.verdicts(old, replace(old, tokens_per_second=40.0))[0] == "slower"

    @pytest.mark.parametrize(
        ("row", "provenance", "said"),
        [
            ({"prompt_set": "other"}, {}, "different prompts"),
            ({"rule": "ratio"}, {}, "different rules"),
            (
                {},
                {"pairs": {"toy": {"target": "law of 9 tokens", "draft": "the same, drifted"}}},
                "law of 6 tokens → law of 9 tokens",
            ),
            ({}, {"workload": {"max_tokens": 96, "seed": 7}}, "max_tokens 48 → 96"),
        ],
    )
    def test_other_prompts_models_or_texts_get_no_verdict_but_a_reason(
        self, row: Any, provenance: Any, said: str
    ) -> None:
        verdict, remarks = self.verdicts(made_row(), made_row(speedup=9.0, **row), **provenance)
        assert verdict == "not comparable" and said in "; ".join(remarks)

    def test_rows_in_one_of_them_only_are_named(self) -> None:
        found = compare(results(made_row(), made_row(suite="own-chat")), results(made_row(), made_row(method="lookup")))
        assert [row.suite for row in found.only_before] == ["own-chat"] and [
            row.method for row in found.only_after
        ] == ["lookup"]
        text = "\n".join(found.lines())
        assert "only in the first: toy · own-chat" in text and "only in the second: toy · own-code · lookup" in text
        assert "1 rows in both: 0 faster, 0 slower, 1 same" in text
        assert compare(results(made_row()), results()).lines()[-1] == "The two have no row in common."

    def test_a_method_is_followed_through_a_change_of_its_setting(self) -> None:
        verdict, remarks = self.verdicts(made_row(setting={"k": 4}), made_row(setting={"k": 6}, speedup=2.5))
        assert verdict == "faster" and remarks == ("setting: k=4 → k=6",)
        several = compare(
            results(made_row(setting={"k": 4})), results(made_row(setting={"k": 6}), made_row(setting={"k": 8}))
        )
        assert not several.changes and len(several.only_after) == 2

    def test_lost_losslessness_and_another_machine_are_pointed_out(self) -> None:
        assert self.verdicts(made_row(), made_row(lossless=False))[1] == ("was lossless, is NOT lossless",)
        other = replace(PROVENANCE, hardware={"processor": "Another", "cores": 2}, commit="ffff")
        said = " ".join(compare(results(made_row()), results(made_row(), provenance=other)).warnings)
        assert "Toy Processor & Sons → Another" in said and "0123456789ab → ffff" in said

    @pytest.mark.slow
    def test_two_runs_of_the_same_thing_differ_as_seldom_as_it_says_and_a_fifth_is_seen(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(aggregate, "interval", lambda mine, base: None)  # not needed here, and most of the time
        draw = random.Random(5)

        def bench(factor: float) -> Results:
            runs = [
                run(
                    method, f"p{at}", repeat, seconds=(2.0 if method == AR else factor) * draw.lognormvariate(0.0, 0.03)
                )
                for repeat in range(5)
                for at in range(3)
                for method in (AR, "pearl")
            ]
            return Results(rows_of(runs), PROVENANCE)

        def alarms(factor: float, pairs: int) -> int:
            return sum(compare(bench(1.0), bench(factor)).changes[1].verdict != "same" for _ in range(pairs))

        assert alarms(1.0, 200) <= 18  # 5 % expected
        assert alarms(1.25, 40) >= 38
        monkeypatch.setattr("specbranch.lab.bench.compare.NOISE_FACTORS", {2: 1.0})  # the bare spread would cry wolf
        assert alarms(1.0, 200) > 40

    def test_it_is_plain_json(self) -> None:
        found = compare(Results(rows_of(toy_runs()), PROVENANCE), Results(rows_of(toy_runs()), PROVENANCE)).to_dict()
        assert json.loads(json.dumps(found)) == found
        assert {change["verdict"] for change in found["changes"]} == {"same"}


class TestTable:
    @settings(max_examples=60, deadline=None)
    @given(
        st.integers(20, 160), st.lists(st.text("abcé漢 ", min_size=1, max_size=40), min_size=1, max_size=3, unique=True)
    )
    def test_no_line_is_wider_than_the_terminal(self, width: int, methods: list[str]) -> None:
        rows = [
            made_row(method=method, setting={"k": 4}, speedup_low=1.8, speedup_high=2.2, branch_hit_rate=0.4)
            for method in methods
        ]
        assert all(line.cell_len <= width for line in table_lines(rows, width))

    def test_at_forty_columns_name_rate_speedup_and_losslessness_remain(self) -> None:
        text = table_text([made_row(), made_row(method=AR, speedup=1.0)], 40)
        assert all(
            word in text
            for word in ("method", "tok/s", "speedup", "lossless", "autoregressive", "2.00×", "50.0", "yes")
        )
        assert "rollback" not in text

    def test_into_a_file_it_is_plain_text_with_every_column(self) -> None:
        out = io.StringIO()
        show(results(made_row(setting={"num_speculative_tokens": 4}, branch_hit_rate=0.4, ttft_seconds=0.1)), out)
        assert "\x1b" not in out.getvalue()
        assert all(
            word in out.getvalue()
            for word in ("rollback", "hits", "first tok", "num_speculative_tokens=4", "measured (wall clock)")
        )

    def test_one_table_of_columns_serves_terminal_page_and_glossary(self, monkeypatch: pytest.MonkeyPatch) -> None:
        added = Column("rounds", lambda row: "42 rounds", "how often the clock struck.", rank=1)
        monkeypatch.setattr("specbranch.lab.bench.results.COLUMNS", (*COLUMNS, added))
        monkeypatch.setattr("specbranch.lab.bench.report.COLUMNS", (*COLUMNS, added))
        page = report_html(results(made_row()))
        assert "42 rounds" in table_text([made_row()]) and "42 rounds" in page and added.meaning in page

    def test_colours_are_used_when_asked_for_and_not_with_no_color(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setenv("TERM", "xterm-256color")
        coloured, plain = io.StringIO(), io.StringIO()
        show(results(made_row()), coloured, width=80, colour=True)
        assert "\x1b[32m" in coloured.getvalue()
        monkeypatch.setenv("NO_COLOR", "1")
        show(results(made_row()), plain, width=80)
        assert "\x1b" not in plain.getvalue()

    def test_a_clock_is_labelled_as_measured_or_modelled(self) -> None:
        assert "measured (wall clock)" in table_text([made_row()]) and "modelled (cost profile c10)" in table_text(
            [made_row(clock="c10")]
        )

    def test_lost_losslessness_is_named_below_the_table(self) -> None:
        said = losslessness([made_row(), made_row(suite="own-chat", lossless=False, differing=2, prompts=4, repeats=3)])
        assert said.startswith("NOT LOSSLESS") and "pearl on own-chat (2 of 12 runs)" in said
        assert "every run of 1 rows" in losslessness(
            [made_row(), made_row(lossless=None)]
        ) and "not checked" in losslessness([])

    def test_a_table_without_rows_is_no_accident(self) -> None:
        assert "not checked" in table_text([], 40)


def test_settings_read_the_same_whatever_their_order() -> None:
    assert (
        setting_text({"b": 0.5, "a": True, "c": "top"})
        == setting_text({"c": "top", "a": True, "b": 0.5})
        == "a=true b=0.5 c=top"
    )


def test_none_of_this_loads_torch_or_numpy() -> None:
    modules = [
        *("lab.suites.suite", "lab.suites.hub", "files", "provenance"),
        *(f"lab.bench.{name}" for name in ("results", "run_store", "aggregate", "compare", "table", "report")),
    ]
    names = ", ".join(f"specbranch.{name}" for name in modules)
    code = f"import sys, {names}; sys.exit(' '.join({{'torch', 'numpy', 'transformers'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""
