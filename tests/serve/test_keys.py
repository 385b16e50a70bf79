"""Who may use the server: keys are hashed at rest and can be revoked; a server on loopback answers to no other name."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from running import Running, load_tiny, running

from specbranch.cli.main import run
from specbranch.errors import BadParameter
from specbranch.serve.keys import KeyFile, new_key

OPEN = ("/health", "/ready", "/version", "/metrics", "/openapi.json", "/")


def test_a_key_opens_and_can_be_revoked_while_the_server_runs(pair: tuple[str, str], tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    ann, bob = new_key(file, "ann"), new_key(file, "bob")
    with running(load_tiny(pair), keys=file) as server:

        def status(authorization: str | bytes) -> int:
            sent = authorization.encode() if isinstance(authorization, str) else authorization
            return server.http.get("/v1/models", headers=[(b"authorization", sent)]).status_code

        assert [status(f"Bearer {key}") for key in (ann, bob, ann + "x", "x")] == [200, 200, 401, 401]
        assert status(f"bearer {ann}") == 200 and status(ann) == status(f"Basic {ann}") == status(b"Bearer \xf1") == 401
        refused = server.post("/v1/completions", {"prompt": "x"})
        assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert [server.http.get(path).status_code for path in OPEN] == [200] * len(OPEN)
        file.write_text("".join(line for line in file.open() if not line.startswith("ann ")))
        assert (status(f"Bearer {ann}"), status(f"Bearer {bob}")) == (401, 200)
        file.unlink()
        assert status(f"Bearer {bob}") == 401


def test_only_hashes_are_stored_and_only_their_owner_reads_them(tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    key = new_key(file, "ann")
    assert key not in file.read_text() and stat.S_IMODE(file.stat().st_mode) == 0o600
    assert KeyFile(file).owner(key) == "ann" and KeyFile(file).owner(key[:-1]) is None
    file.write_text(file.read_text().strip())  # as an editor may leave it
    assert new_key(file, "bob") != key and len(key) > 40 and KeyFile(file).owner(key) == "ann"


def test_mistakes_with_keys_are_sentences(tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    with pytest.raises(BadParameter, match=r"cannot be read .* --new-key NAME"):
        KeyFile(file)
    new_key(file, "ann")
    with pytest.raises(BadParameter, match="has a key 'ann' already"):
        new_key(file, "ann")
    with pytest.raises(BadParameter, match="expected letters"):
        new_key(file, "an n")
    file.write_text("sk-123\n")
    with pytest.raises(BadParameter, match=r"Line 1 of .* is no key"):
        KeyFile(file)


def test_the_command_makes_a_key_and_refuses_to_be_open_by_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.txt"
    assert run(["serve", "--keys", str(file), "--new-key", "ann"]) == 0
    assert KeyFile(file).owner(capsys.readouterr().out.strip()) == "ann"
    assert run(["serve", "--new-key", "ann"]) == 2 and "needs --keys FILE" in capsys.readouterr().err
    assert run(["serve", "--host", "0.0.0.0"]) == 2 and "there are no keys" in capsys.readouterr().err
    assert run(["serve", "--keys", str(tmp_path / "none")]) == 2 and "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "10.0.0.7:8000", ""])
def test_a_server_on_loopback_answers_to_no_other_name(served: Running, host: str) -> None:
    assert served.http.get("/v1/models", headers={"host": host}).status_code == 421
    for own in ("localhost", "LOCALHOST:80", "127.0.0.1:9", "[::1]:9"):
        assert served.http.get("/v1/models", headers={"host": own}).status_code == 200


def test_a_name_can_be_allowed(pair: tuple[str, str]) -> None:
    with running(load_tiny(pair), allowed_hosts=("model.example",)) as server:
        assert server.http.get("/version", headers={"host": "model.example"}).status_code == 200
        assert server.http.get("/version", headers={"host": "other.example"}).status_code == 421


def test_pages_and_answers_carry_a_strict_policy(served: Running) -> None:
    page, answer = served.http.get("/"), served.http.get("/v1/models")
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert answer.headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"
    for response in (page, answer):
        assert response.headers["x-content-type-options"] == "nosniff"
        assert (
            not any(name.startswith("access-control") for name in response.headers) and "server" not in response.headers
        )
