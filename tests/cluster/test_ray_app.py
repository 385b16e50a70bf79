"""A Serve config file has the names of the command's options; a wrong one is a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from specbranch.cluster.arguments import parsed
from specbranch.cluster.settings import Scale
from specbranch.config import LoadOptions
from specbranch.errors import BadParameter


def test_arguments_go_to_the_engine_the_server_and_the_replicas() -> None:
    given = {"target": "big", "context_length": 512, "keys": "keys.txt", "allowed_hosts": ["a"], "max_batch": 4}
    engine, server, scale = parsed({**given, "replicas": 2, "max_replicas": 3})
    assert engine.values == {"target": "big", "options": LoadOptions(context_length=512, max_batch=4)}
    assert (server.keys, server.allowed_hosts, server.max_batch) == (Path("keys.txt"), ("a",), 4)
    assert scale == Scale(replicas=2, max_replicas=3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"replicaz": 2}, "replicaz.*replicas"),
        ({"replicas": 0, "without_keys": True}, "replicas is 0; expected a whole number from 1"),
        ({"replicas": 4, "max_replicas": 2, "without_keys": True}, "max_replicas is 2"),
        ({}, "there are no keys"),
    ],
)
def test_a_mistake_in_a_file_is_a_sentence(given: dict[str, object], said: str) -> None:
    with pytest.raises(BadParameter, match=said):
        parsed(given)


@pytest.mark.slow  # it imports Ray
def test_the_application_has_a_front_before_the_replicas() -> None:
    from specbranch.cluster.ray_app import app

    built = app({"replicas": 2, "without_keys": True})
    assert built._bound_deployment.name == "front"
    replicas = built._bound_deployment.init_args[0]._bound_deployment
    assert replicas.name == "replica" and replicas.num_replicas == 2
