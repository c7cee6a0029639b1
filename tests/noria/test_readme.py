"""The README's code runs, and what it names exists."""

import re
from pathlib import Path

import noria

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_python_example_runs_as_it_stands(chat_service, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert "localhost:50051" in code
    exec(code.replace("localhost:50051", chat_service.address), {})
    assert capsys.readouterr().out.startswith("Yes, it is.\nend_turn Usage(")


def test_every_make_target_and_option_that_it_names_exists():
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"^make ([\w-]+)", readme, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    assert issubclass(noria.QueueFullError, noria.NoriaError)


def test_the_architecture_fits_one_screen_and_names_only_what_is_there():
    text = (ROOT / "docs" / "architecture.md").read_text()
    assert len(text.splitlines()) <= 60
    names = set(re.findall(r"\b(\w+\.py)\b", text))
    there = {path.name for folder in ("noria", "router", "tokenizer_svc", "worker")
             for path in (ROOT / folder).rglob("*.py")}  # fmt: skip
    assert names <= there
