"""Draft workers on Ray: a node that is taken away costs time only, and drafting resumes when one is back."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specbranch.assembly import ServedDraft
from specbranch.cluster import draft_actors as actors
from specbranch.cluster.draft_actors import OnRay, Secret, Where, secret_of
from specbranch.core.loop import Loop
from specbranch.core.methods import METHODS
from specbranch.errors import BadParameter, ModelError
from specbranch.exec import process
from specbranch.exec.address import KEY_VARIABLE, LinkAddress
from specbranch.exec.dialling import Dial
from specbranch.exec.finding import Found, Listed, finder_of
from specbranch.exec.greeting import Refused
from specbranch.exec.process import Process
from specbranch.extras import Extra
from toy_worker import DRIFT, SECRET, SERVED, TOKENS, free_port, serving, vocabulary
from toybench import SHARED, Case, Ending, Timeless, answer, config_of, law, make_drafter, make_verifier, plainly

HANG = 120.0  # seconds: a guard against hangs
SLOWLY = 0.15  # seconds of a round while something is waited for: the requests must not end before
OBJECT_STORE = 80 << 20  # bytes, the least that Ray takes


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


def load_toy() -> ServedDraft:
    return ServedDraft(make_drafter(DRIFT), SERVED, TOKENS)


def fail_to_load() -> ServedDraft:
    raise ModelError("There is no such draft.")


def test_a_list_of_addresses_is_tried_from_another_one_each_time_until_one_answers() -> None:
    with serving() as port:
        dead = [LinkAddress("127.0.0.1", free_port()) for _ in range(2)]
        where = Listed((*dead, LinkAddress("127.0.0.1", port)))
        assert len({tuple(found.address.port for found in where.find()) for _ in range(3)}) == 3
        with closing(Process(make_verifier(), Dial(where, vocabulary()))) as executor:
            assert executor.draft_state == "ready"


def test_several_addresses_are_read_and_each_needs_its_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    found = finder_of("tcp://127.0.0.1:1, tcp://localhost:2")
    assert found.name == "tcp://127.0.0.1:1,tcp://localhost:2" and found.is_local
    with pytest.raises(BadParameter, match=r"tcp://10.0.0.1:2 is not this machine alone, so a link needs a secret"):
        finder_of("tcp://127.0.0.1:1,tcp://10.0.0.1:2")
    with pytest.raises(BadParameter, match=r"expected tcp://HOST:PORT"):
        finder_of("tcp://127.0.0.1:1,nonsense")


def test_a_secret_is_printed_nowhere() -> None:
    secret = Secret(SECRET)
    where = Where("127.0.0.1", 1, secret)
    said = f"{secret!r} {where!r} {where} {Found(LinkAddress('127.0.0.1', 1), SECRET)!r}"
    assert SECRET.decode() not in said
    assert secret_of({KEY_VARIABLE: SECRET.decode()}).value == SECRET
    assert secret_of({}).value != secret_of({}).value and len(secret_of({}).value) >= 64
    with pytest.raises(BadParameter, match="expected at least 16"):
        secret_of({KEY_VARIABLE: "short"})


def test_the_worker_with_the_fewest_targets_is_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = Secret(SECRET)
    there = {str(n): Where("10.0.0.1", n, secret, targets=n) for n in (3, 1, 2)}
    broken: dict[str, Where | None] = {"gone": None, "broken": Where("10.0.0.1", 9, secret, failure="no draft")}
    monkeypatch.setattr(actors, "wheres", lambda name: {**broken, **there})
    assert [found.address.port for found in OnRay("x").find()] == [1, 2, 3]
    monkeypatch.setattr(actors, "wheres", lambda name: broken)
    with pytest.raises(Refused, match=r"no draft worker named 'x' answers on Ray\. Start one: specbranch draft-worker"):
        OnRay("x").find()


def test_who_comes_and_goes_is_said_and_a_draft_that_cannot_be_loaded_ends_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, said = Where("10.0.0.1", 7, Secret(SECRET)), list[str]()
    looks = iter([{}, {"d-0": None}, {"d-0": here}, {"d-0": here}, {"d-0": None}, {"d-0": replace(here, failure="no")}])
    monkeypatch.setattr(actors, "wheres", lambda name: next(looks))
    monkeypatch.setattr(actors, "FOLLOW_SECONDS", 0.0)
    with pytest.raises(ModelError, match="d-0 cannot draft: no"):
        actors.follow("d", said.append, threading.Event())
    assert [line.partition(" ")[2][:20] for line in said[1:]] == ["serves at tcp://10.0", "does not answer. Ray"]
    assert SECRET.decode() not in "".join(said)


@pytest.mark.parametrize("name", ["", "a/b", "x" * 65])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(BadParameter, match=r"expected ray://NAME"):
        finder_of(f"ray://{name}")


def test_one_thread_at_a_time_waits_for_a_ray_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answer = threading.Event(), threading.Event()

    def hang(name: str) -> dict[str, Any]:
        asked.set()
        answer.wait(HANG)
        return {}

    monkeypatch.setattr(actors, "wheres", hang)
    where = actors.OnRay("draft")

    def find() -> None:
        with pytest.raises(Refused, match="no draft worker"):
            where.find()

    first = threading.Thread(target=find)
    first.start()
    assert asked.wait(HANG)
    with pytest.raises(Refused, match="Ray does not answer"):
        where.find()
    answer.set()
    first.join(HANG)
    find()


def test_a_target_outlives_ray_and_the_command_that_keeps_the_workers_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured with a head that is killed: without the setting Ray ends the target after a minute."""
    variable, _ = actors.OUTLIVE_RAY
    monkeypatch.setenv(variable, "")  # so that it is as before afterwards
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port()}")
    monkeypatch.delenv(variable)
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(Extra, "is_installed", True)
    with pytest.raises(BadParameter, match="No Ray cluster answers"):
        actors.connect_ray(None)
    assert variable not in os.environ
    with pytest.raises(ModelError, match=r"There is no draft from ray://draft: No Ray cluster answers"):
        actors.on_ray("draft")
    assert int(os.environ[variable]) > 86_400


@pytest.mark.slow  # it imports Ray
def test_a_target_has_no_thread_that_listens_to_rays_daemons(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one, and without the head, answers stood still for 25 to 40 seconds."""
    worker = pytest.importorskip("ray._private.worker")
    monkeypatch.setattr(worker, "listen_error_messages", worker.listen_error_messages)  # fails if Ray renames it
    actors._hear_no_daemons()
    assert worker.listen_error_messages(None, None) is None


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A Ray cluster on this machine whose head has no room for drafts."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # Ray's processes find the toys
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        head = {"num_cpus": 1, "object_store_memory": OBJECT_STORE, "include_dashboard": False}
        one = Cluster(initialize_head=True, connect=True, head_node_args=head)
        try:
            yield one
        finally:
            ray.shutdown()
            one.shutdown()


def with_draft(cluster: Any, count: int = 1) -> Any:
    """A node with the resource `draft`."""
    return cluster.add_node(num_cpus=1, resources={"draft": count}, object_store_memory=OBJECT_STORE)


def wait_until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + HANG
    while not happened():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.02)


@pytest.mark.slow
def test_a_node_with_drafts_is_taken_away_while_8_requests_run_and_another_comes(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "LONGEST_RESTART_WAIT", 0.2)
    node = with_draft(cluster)
    with actors.draft_actors(load_toy, 1, "test"):
        wait_until(lambda: any(actors.wheres("test").values()))
        where = finder_of("ray://test")
        executor = Process(make_verifier(), Dial(where, vocabulary()))
        with closing(executor):
            loop, runs = Loop(executor), []
            for seed in range(8):
                case = Case((seed % 6, 1), 0.7, seed, Ending("long", max_tokens=600))
                session = case.session(seed)
                config = config_of(("pearl", "confidence")[seed % 2], "match")
                loop.join(session, METHODS[config.method].start(session, config, Timeless(SHARED)))
                runs.append((session, case))

            def step_until(happened: Callable[[], bool], seconds: float = 0.0) -> None:
                end = time.monotonic() + HANG
                while loop.live and not happened():
                    assert time.monotonic() < end, "it does not happen"
                    loop.step()
                    time.sleep(seconds)

            step_until(lambda: all(len(session.output) >= 30 for session, _ in runs))
            assert all("draft" in session.origins for session, _ in runs)
            cluster.remove_node(node, allow_graceful=False)
            step_until(lambda: all(session.stats.rounds_without_draft > 0 for session, _ in runs), SLOWLY)
            with_draft(cluster)
            assert loop.live, "the requests ended before the node was back"
            drafted = {session.number: len(session.output) for session, _ in runs}
            step_until(lambda: executor.restarts > 0, SLOWLY)  # alone
            assert executor.restarts == 1 and loop.live
            step_until(lambda: False)
            assert [answer(session) for session, _ in runs] == [plainly(case, law()) for _, case in runs]
            assert any("draft" in session.origins[drafted[session.number] :] for session, _ in runs)
        with pytest.raises(BadParameter, match="named 'test' on Ray already"), actors.draft_actors(load_toy, 1, "test"):
            pass
    with pytest.raises(Refused, match="no draft worker named 'test'"):
        where.find()


@pytest.mark.slow
def test_actors_spread_targets_keep_their_secret_and_say_why_a_draft_cannot_be_loaded(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, SECRET.decode())
    with_draft(cluster, 2)
    with actors.draft_actors(load_toy, 2, "two"):
        wait_until(lambda: sum(one is not None for one in actors.wheres("two").values()) == 2)
        where = finder_of("ray://two")
        with (
            closing(Process(make_verifier(), Dial(where, vocabulary()))),
            closing(Process(make_verifier(), Dial(where, vocabulary()))),
        ):
            assert sorted(one.targets for one in actors.wheres("two").values() if one) == [1, 1]
        stranger = where.find()[0].address
        with pytest.raises(ModelError, match="the worker wants a secret"):
            _without_secret(stranger)
    with (
        pytest.raises(ModelError, match=r"cannot draft: There is no such draft"),
        actors.draft_actors(fail_to_load, 1, "bad"),
    ):
        actors.follow("bad", lambda line: None, threading.Event())
    logs = [path for path in Path(cluster.head_node.get_logs_dir_path()).rglob("*") if path.is_file()]
    assert logs and not [path for path in logs if SECRET in path.read_bytes()]


def _without_secret(address: LinkAddress) -> None:
    """Dial an address without the secret."""

    class Open:
        """A finder that knows no secret."""

        name, is_local = "a stranger", False

        def find(self) -> list[Found]:
            return [Found(address, b"")]

    Dial(Open(), vocabulary()).check()
