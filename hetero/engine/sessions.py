"""The methods of `Engine` that deal with sessions."""

from __future__ import annotations

import os
from collections.abc import Sequence as Seq
from pathlib import Path

from hetero.engine.moving import Moving
from hetero.engine.session import Session
from hetero.engine.stepper import Stepper
from hetero.errors import ArgumentError


class SessionMethods:
    """Conversations that keep keys and values between turns; `Engine.generate` takes them as prompts."""

    _seed: int

    def session(
        self, prompt: Seq[int], *, stream: tuple[int, int] = (0, 0), version: int | None = None
    ) -> Session:
        """Begin a conversation with token ids; nothing is computed yet.

        `generate([session])` adds the completion to it, `session.extend(ids)` what others say.

        Args:
            version: of the adapter that it is bound to, one that is in memory; by default the one with which
                it first runs.

        Raises:
            ModelError: the version is not in memory.
        """
        session = Session(prompt, stream, self._seed)
        if version is not None:
            session.namespace, session.adapter_version = self._open().runner.namespace(version), version
        return session

    def fork(self, session: Session, n: int, *, samples: Seq[int] | None = None) -> list[Session]:
        """n more sessions that continue from where `session` is now, also while it is being generated.

        They share its blocks by reference; only the last, partly filled one is copied, when it is written.

        Args:
            samples: second id of each one's random stream; by default the n ids after the session's own.

        Raises:
            ArgumentError: n is less than 1, or `samples` are not n.
        """
        first = session.stream[1] + 1
        samples = range(first, first + n) if samples is None else samples
        if n < 1 or len(samples) != n:
            raise ArgumentError(
                f"fork(n={n}, {len(samples)} samples); expected n >= 1 and one sample for each."
            )
        return [self._fork(session, sample) for sample in samples]

    def export_session(self, session: Session, path: str | os.PathLike[str]) -> Path:
        """Write a session, tokens and keys and values, to the file `path` for `import_session` anywhere.

        Raises:
            ModelError: it ran under an adapter version that is not in memory any more.
            OSError: the file cannot be written; one that was there is still there.
        """
        path = Path(path)
        copy = self._fork(session, session.stream[1])
        try:
            self._moving().export(copy, path)
        finally:
            copy.close()
        return path

    def import_session(self, path: str | os.PathLike[str]) -> Session:
        """Read a session that another process, or another engine, has exported.

        It continues with the bits with which it would have continued there. Blocks that are damaged, or that
        kv_memory has no room for, are computed again (`stats.disk_refused` counts the former).

        Raises:
            ModelError: it was made by other weights, by an adapter of which no version in memory is equal, or
                by another build; says what differs from now.
            CheckpointError: the file is no session, or torn.
        """
        return self._moving().load(Path(path))

    def _fork(self, session: Session, sample: int) -> Session:
        copy = session.copy(sample)
        self._open().scheduler.resting.share(session, copy)
        return copy

    def _moving(self) -> Moving:
        stepper = self._open()
        return Moving(stepper.runner, stepper.blocks, stepper.scheduler.resting, stepper.stats)

    def _open(self) -> Stepper:
        raise NotImplementedError
