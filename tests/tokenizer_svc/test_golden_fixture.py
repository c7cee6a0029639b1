"""The fixture tokenizer is what its script writes."""

import runpy


def test_the_committed_files_are_those_of_the_script(golden_model, tmp_path):
    """Nobody edits them by hand."""
    runpy.run_path(str(golden_model / "build.py"))["main"](tmp_path)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(written) == ["config.json", "tokenizer.json", "tokenizer_config.json"]
    assert written == {name: (golden_model / name).read_bytes() for name in written}
