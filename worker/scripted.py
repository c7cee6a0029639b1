"""A scripted model: replays given ids and logits, and fails where it is told to.

It replaces nothing but the forward pass. Its "keys and values" are a rolling hash of the
sequence so far, written at the scheduled slots and read back through block tables: a
wrong slot, position or table changes the hash, and with it the output. What a script does
not cover is a small random language model: the next token is a function of the hash.

A script file is JSON:

    {"scripts": [{"prompt_token_ids": [5, 9],
                  "output_token_ids": [7, 2],
                  "logits": {"0": {"7": -0.357, "8": -1.204}},
                  "faults": {"1": {"kind": "sleep", "seconds": 0.5}}}],
     "step_seconds": 0.0, "mean_output_tokens": 20, "token_ids": [10, 256]}

`logits` and `faults` are keyed by output index. A fault is `raise`, `sleep` or `hang`, and
happens in the forward pass that computes the logits of that index.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from worker.attention.base import AttentionMetadata, KVCacheSpec

_MASK = (1 << 62) - 1
_START = 0x1E3779B97F4A7C15 & _MASK
_SPREAD = 0x5851F42D4C957F2D


class ScriptedFault(RuntimeError):  # noqa: N818 - it is the script's, not an error of ours
    """Raised where a script says `raise`."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens at one output index: `kind` is raise, sleep or hang."""

    kind: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Script:
    """The output of one prompt; see the module's docstring."""

    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    logits: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    faults: Mapping[int, Fault] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ScriptSet:
    """All scripts of a worker.

    `step_seconds` is slept in every forward pass. Beyond the scripts EOS comes with
    probability 1 / `mean_output_tokens` (0: never), and other ids are taken from the range
    `token_ids`, [first, end) (None: the whole vocabulary).
    """

    scripts: tuple[Script, ...] = ()
    step_seconds: float = 0.0
    mean_output_tokens: float = 20.0
    token_ids: tuple[int, int] | None = None


def load_scripts(path: Path) -> ScriptSet:
    """Read a script file. Raises ValueError naming the file for anything malformed."""
    try:
        raw = json.loads(path.read_text())
        return ScriptSet(
            tuple(_script(entry) for entry in raw.get("scripts", [])),
            float(raw.get("step_seconds", 0.0)),
            float(raw.get("mean_output_tokens", 20.0)),
            _range(raw.get("token_ids")),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is not a script file: {error!r}") from error


def _range(pair: list[int] | None) -> tuple[int, int] | None:
    if pair is None:
        return None
    first, end = pair
    if not 0 <= first < end:
        raise ValueError(f"token_ids [{first}, {end}) is empty")
    return first, end


def _script(entry: dict[str, Any]) -> Script:
    faults = {int(k): Fault(**fault) for k, fault in entry.get("faults", {}).items()}
    for fault in faults.values():
        if fault.kind not in ("raise", "sleep", "hang"):
            raise ValueError(f"fault kind {fault.kind!r}; there are raise, sleep and hang")
    logits = {
        int(k): {int(token): float(value) for token, value in row.items()}
        for k, row in entry.get("logits", {}).items()
    }
    prompt, output = tuple(entry["prompt_token_ids"]), tuple(entry["output_token_ids"])
    return Script(prompt, output, logits, faults)


def advance(state: int, token_id: int) -> int:
    """The hash of a sequence one token longer."""
    state = (state ^ (token_id + 1)) * _SPREAD & _MASK
    return state ^ (state >> 29)


class ScriptedCache:
    """An `AttentionBackend` that stores one (hash, position) per slot instead of K and V."""

    name = "scripted"
    row_exact = True
    captures_decodes = False
    default_block_size = 16

    def __init__(self) -> None:
        self._states = np.zeros((0, 0), np.int64)
        self._positions = np.zeros((0, 0), np.int64)
        self._metadata: AttentionMetadata | None = None

    def allocate(self, spec: KVCacheSpec, num_blocks: int, block_size: int) -> None:
        self._states = np.zeros((num_blocks, block_size), np.int64)
        self._positions = np.full((num_blocks, block_size), -1, np.int64)

    def plan(self, metadata: AttentionMetadata) -> None:
        self._metadata = metadata

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        raise TypeError("a scripted model has no keys and values")

    def attend(
        self, layer: int, query: torch.Tensor, scale: float, window: int | None = None
    ) -> torch.Tensor:
        raise TypeError("a scripted model does not attend")

    def fold(self, token_ids: list[int]) -> list[int]:
        """Hashes after each of the packed [T] tokens; stores them at the planned slots."""
        metadata = self._metadata
        if metadata is None:
            raise RuntimeError("fold before plan")
        positions, slots = metadata.positions.tolist(), metadata.slot_mapping.tolist()
        tables, starts = metadata.block_table.tolist(), metadata.query_start_host
        states = []
        for row, table in enumerate(tables):
            first, last = starts[row], starts[row + 1]
            state = self._before(table, positions[first])
            for at in range(first, last):
                state = advance(state, token_ids[at])
                self._store(slots[at], state, positions[at])
                states.append(state)
        return states

    def _before(self, table: list[int], position: int) -> int:
        if position == 0:
            return _START
        block_size = self._states.shape[1]
        block, offset = table[(position - 1) // block_size], (position - 1) % block_size
        if self._positions[block, offset] != position - 1:
            raise RuntimeError(f"block {block} does not hold position {position - 1}")
        return int(self._states[block, offset])

    def _store(self, slot: int, state: int, position: int) -> None:
        block, offset = divmod(slot, self._states.shape[1])
        if block == 0:
            raise RuntimeError("a write to the null block")
        self._states[block, offset] = state
        self._positions[block, offset] = position


@dataclass(frozen=True, slots=True)
class _Line:
    """What follows one exact history."""

    token_id: int
    logits: Mapping[int, float] | None
    fault: Fault | None


class ScriptedModel:
    """The forward pass of a scripted worker: `worker.models.base.Model` over a ScriptedCache.

    The hidden state of a position is its hash, [T, 1] int64.
    """

    def __init__(
        self,
        scripts: ScriptSet,
        vocab_size: int,
        eos_token_id: int,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.kv_spec = KVCacheSpec(1, 1, 1, torch.int64)
        self.vocab_size = vocab_size
        self._eos_token_id = eos_token_id
        self._scripts = scripts
        self._sleep = sleep
        self._lines: dict[int, _Line] = {}
        for script in scripts.scripts:
            self._learn(script)

    def _learn(self, script: Script) -> None:
        state = _START
        for token_id in script.prompt_token_ids:
            state = advance(state, token_id)
        for index, token_id in enumerate(script.output_token_ids):
            line = _Line(token_id, script.logits.get(index), script.faults.get(index))
            self._lines.setdefault(state, line)
            state = advance(state, token_id)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: ScriptedCache
    ) -> torch.Tensor:
        """Hashes of the packed positions, [T, 1]."""
        if self._scripts.step_seconds:
            self._sleep(self._scripts.step_seconds)
        states = attention.fold(token_ids.tolist())
        for state in states:
            self._suffer(state)
        return torch.tensor(states, dtype=torch.int64).unsqueeze(1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the given positions, [S, vocab_size] fp32."""
        rows = torch.full((hidden.shape[0], self.vocab_size), -torch.inf)
        for row, state in enumerate(hidden[:, 0].tolist()):
            chosen = self._distribution(state)
            rows[row, list(chosen)] = torch.tensor(list(chosen.values()))
        return rows

    def _distribution(self, state: int) -> Mapping[int, float]:
        line = self._lines.get(state)
        if line is None:
            return self._babble(state)
        return {line.token_id: 0.0} if line.logits is None else line.logits

    def _babble(self, state: int) -> Mapping[int, float]:
        """Four candidates, half as likely each, drawn from the history's hash."""
        mean = self._scripts.mean_output_tokens
        if mean and (state >> 8) % 1_000_000 < 1_000_000 / mean:
            return {self._eos_token_id: 0.0}
        first, end = self._scripts.token_ids or (0, self.vocab_size)
        candidates = [first + (state >> shift) % (end - first) for shift in (0, 11, 23, 37)]
        return {
            token_id: -0.7 * rank
            for rank, token_id in reversed(list(enumerate(candidates)))
            if token_id != self._eos_token_id
        } or {(self._eos_token_id + 1) % self.vocab_size: 0.0}

    def _suffer(self, state: int) -> None:
        line = self._lines.get(state)
        if line is None or line.fault is None:
            return
        match line.fault.kind:
            case "raise":
                raise ScriptedFault("the script says so")
            case "sleep":
                self._sleep(line.fault.seconds)
            case _:
                threading.Event().wait()
