"""The child process in which grammars are compiled first: `python -m worker.grammar.trial_process`.

It reads frames from its input and answers each on its output: first the vocabulary, then
grammars. It ends when its input does, or when one grammar takes more than its time.
"""

import json
import resource
import signal
import sys
from pathlib import Path
from typing import IO, Any

from worker.grammar import problems
from worker.grammar.matcher import compiled
from worker.grammar.source import GrammarError, GrammarKind, GrammarSource
from worker.grammar.tokens import TokenTable

_LENGTH_BYTES = 4
# Of memory, beyond what the process holds once it has the vocabulary.
_MEMORY_BYTES = 48 * 1024 * 1024


def write_frame(stream: IO[bytes], content: Any) -> None:
    """One message: its length, then JSON."""
    encoded = json.dumps(content).encode()
    stream.write(len(encoded).to_bytes(_LENGTH_BYTES, "big") + encoded)
    stream.flush()


def read_frame(stream: IO[bytes]) -> Any:
    """The next message; None at the end of the stream."""
    length = stream.read(_LENGTH_BYTES)
    if len(length) < _LENGTH_BYTES:
        return None
    content = stream.read(int.from_bytes(length, "big"))
    return json.loads(content) if content else None


def table_frame(table: TokenTable) -> Any:
    """A vocabulary as a message."""
    pieces = [piece.decode("latin-1") for piece in table.pieces]
    return [pieces, list(table.special_ids), list(table.eos_ids), table.size]


def _table(frame: Any) -> TokenTable:
    pieces, special_ids, eos_ids, size = frame
    return TokenTable([piece.encode("latin-1") for piece in pieces], special_ids, eos_ids, size)


def main() -> None:
    """Answer each grammar with "" or with what is wrong with it."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    table = _table(read_frame(requests))
    try:
        tokenizer = table.tokenizer()
    except GrammarError as error:
        write_frame(answers, str(error))
        return
    _limit_itself()
    write_frame(answers, "")
    while (frame := read_frame(requests)) is not None:
        kind, texts, seconds = frame
        # Its default ends the process, whatever that is in the middle of.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        problem = ""
        try:
            compiled(tokenizer, GrammarSource(GrammarKind(kind), tuple(texts)))
        except GrammarError as error:
            problem = str(error)
        except BaseException:
            # Out of memory, or a panic of the library.
            problem = f"{problems.TOO_COMPLEX} to compile"
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_frame(answers, problem)


def _limit_itself() -> None:
    # A core would hold grammars.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return
    held = resource.getpagesize() * int(statm.read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (held + _MEMORY_BYTES,) * 2)


if __name__ == "__main__":
    main()
