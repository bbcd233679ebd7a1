"""Sessions that leave this process, and those that come."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hetero.engine.kv_cache import BlockManager, extend_hashes
from hetero.engine.runner import Runner
from hetero.engine.session import Resting, Session
from hetero.engine.session_file import Description, check_fingerprint, read_description, write_session
from hetero.engine.stats import EngineStats
from hetero.errors import ModelError
from hetero.kernels.batch import KV_BLOCK


class Moving:
    """Args:
    runner: the model.
    blocks: the KV cache.
    resting: holds the blocks of sessions.
    stats: gets disk_refused.
    """

    def __init__(self, runner: Runner, blocks: BlockManager, resting: Resting, stats: EngineStats) -> None:
        self._runner = runner
        self._blocks = blocks
        self._resting = resting
        self._stats = stats

    def export(self, session: Session, path: Path) -> None:
        """Write a session at rest. See `Engine.export_session`."""
        name = self._runner.namespace() if session.namespace is None else session.namespace
        if name not in self._runner.resident():
            raise ModelError(
                f"The session ran under {name}, which is not in memory any more. Export a session while its "
                "adapter version is."
            )
        kept = self._resting.held(session)
        size = self._blocks.store.bytes_per_block
        blocks = [np.empty(size, np.uint8) for _ in (kept.blocks if kept is not None else ())]
        for i, block in enumerate(blocks):
            assert kept is not None
            self._blocks.store.read_block(kept.blocks[i], block)
        description = Description(
            fingerprint=self._runner.fingerprint(name),
            token_ids=session.token_ids,
            logprobs=session.logprobs,
            stream=session.stream,
            seed=session.seed,
            num_computed=session.num_kept,
            bytes_per_block=size,
            crcs=[zlib.crc32(block.data) for block in blocks],
        )
        write_session(path, description, blocks)

    def load(self, path: Path) -> Session:
        """Read a session. See `Engine.import_session`."""
        with open(path, "rb") as file:
            description = read_description(file)
            name, version = self._made_by(path, description)
            session = Session(description.token_ids, description.stream, description.seed)
            session.logprobs = list(description.logprobs)
            if description.crcs or any(value is not None for value in session.logprobs):
                session.namespace, session.adapter_version = name, version
            if not description.crcs:
                return session
            data: npt.NDArray[np.uint8] = np.empty(description.bytes_per_block, np.uint8)
            blocks: list[int] = []
            for crc in description.crcs:
                whole = file.readinto(data.data) == data.nbytes and zlib.crc32(data.data) == crc
                self._stats.disk_refused += not whole
                block = self._blocks.allocate() if whole else None
                if block is None:  # damaged, or no room: what is missing is computed
                    break
                self._blocks.store.write_block(block, data)
                blocks.append(block)
        self._rest(session, blocks, min(description.num_computed, len(blocks) * KV_BLOCK))
        return session

    def _made_by(self, path: Path, description: Description) -> tuple[str, int]:
        """Namespace and version of the weights that made a session. Raises ModelError without them."""
        runner = self._runner
        current = runner.namespace(), runner.adapter_version()
        kept = [(runner.namespace(number), number) for number in reversed(runner.versions())]
        for name, version in (current, *kept):
            if runner.fingerprint(name) == description.fingerprint:
                return name, version
        check_fingerprint(path, description.fingerprint, runner.fingerprint())
        raise AssertionError("a fingerprint that equals none differs from that of now")

    def _rest(self, session: Session, blocks: list[int], num_computed: int) -> None:
        """Make full blocks findable and hold all of them for the session."""
        assert session.namespace is not None
        space, num_full = self._blocks.namespace(session.namespace), num_computed // KV_BLOCK
        hashes: list[bytes] = []
        extend_hashes(hashes, space, session.token_ids, num_full)
        for content_id, block in zip(hashes, blocks, strict=False):
            self._blocks.register(space, content_id, block)
        self._resting.keep(session, space, blocks, num_computed)
        self._blocks.release(blocks)
