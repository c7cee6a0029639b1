"""What every test of the client and the command has."""

import pytest

from tests.noria.fake_chat import FakeChat, serving


@pytest.fixture
def chat_service():
    with serving(FakeChat()) as chat:
        yield chat


@pytest.fixture(autouse=True)
def own_config(tmp_path, monkeypatch):
    """No test sees or changes the user's own key."""
    monkeypatch.setenv("NORIA_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.delenv("NORIA_API_KEY", raising=False)
