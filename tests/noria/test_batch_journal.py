"""The output file remembers what is done, whatever happened to those who wrote it."""

import pytest

from noria.batch.journal import JournalError, open_journal


def test_what_is_appended_is_done_for_whoever_opens_the_file_next(tmp_path):
    path = tmp_path / "out"
    with open_journal(path) as journal:
        journal.append(1, "a", {"text": "네\u2028"})
        journal.append(3, "c", {"error": {}})
        with pytest.raises(ValueError, match="done already"):
            journal.append(1, "a", {})
    with open_journal(path) as journal:
        assert journal.done == {1: "a", 3: "c"}
        journal.append(2, "b", {})
    assert len(path.read_bytes().splitlines()) == 3


@pytest.mark.parametrize("cut", range(1, 30))
def test_what_a_killed_run_left_of_a_line_is_cut_off(tmp_path, cut):
    path = tmp_path / "out"
    with open_journal(path) as journal:
        journal.append(1, "a", {"text": "x"})
        whole = path.read_bytes()
        journal.append(2, "b", {"text": "y"})
    path.write_bytes(path.read_bytes()[:-cut])
    with open_journal(path) as journal:
        assert journal.done == {1: "a"}
        assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "content",
    ["hello\n", "hello", '{"prompt": "x"}', '{"line": 1}\n', '{"line": 1, "id": "a"}\n' * 2],
)
def test_a_file_that_is_no_output_of_a_batch_is_left_alone(tmp_path, content):
    path = tmp_path / "out"
    path.write_text(content)
    with pytest.raises(JournalError), open_journal(path):
        pass
    assert path.read_text() == content


def test_two_batches_never_write_one_file(tmp_path):
    path = tmp_path / "out"
    with (
        open_journal(path),
        pytest.raises(JournalError, match="another batch"),
        open_journal(path),
    ):
        pass
