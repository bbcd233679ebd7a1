"""A conversation that keeps its keys and values between its turns."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from hetero.errors import ArgumentError
from hetero.kernels.batch import KV_BLOCK

if TYPE_CHECKING:
    from hetero.engine.kv_cache import BlockManager, Namespace


class Running(Protocol):
    """What a session needs of the `Sequence` that continues it."""

    token_ids: list[int]
    logprobs: list[float]
    adapter_version: int
    blocks: list[int]
    num_computed: int
    slot: int


class Session:
    """What `Engine.session`, `fork` and `import_session` make and `Engine.generate` takes for a prompt.

    Generating in two calls draws the same tokens, with the same bits, as generating in one. The session is
    bound to the adapter version under which it first ran.

    Attributes:
        token_ids: all tokens so far, given and sampled.
        logprobs: of each token: None for given ones; for sampled ones as in `Completion.logprobs`.
        stream: (task, sample) ids of its random stream.
        seed: of that stream, where `SamplingParams.seed` is None.
        adapter_version: that computed it; None before it first ran.
    """

    def __init__(self, token_ids: Iterable[int], stream: tuple[int, int], seed: int) -> None:
        self.token_ids = list(token_ids)
        self.logprobs: list[float | None] = [None] * len(self.token_ids)
        self.stream = stream
        self.seed = seed
        self.adapter_version: int | None = None
        self.namespace: str | None = None
        self._running: Running | None = None
        self._space: Namespace | None = None
        self._kept: Kept | None = None

    def extend(self, token_ids: Iterable[int]) -> None:
        """Add given tokens: the user's next message, what a tool said. Raises ArgumentError while it runs."""
        if self._running is not None:
            raise ArgumentError("The session is being generated; extend it when that has ended.")
        added = list(token_ids)
        self.token_ids += added
        self.logprobs += [None] * len(added)

    def close(self) -> None:
        """Let go of its keys and values. They would be let go of anyway when others need the memory."""
        if self._kept is not None:
            self._kept.resting.drop(self)

    @property
    def num_kept(self) -> int:
        """Leading tokens whose keys and values are held."""
        return 0 if self._kept is None else self._kept.num_computed

    # --- the engine's side

    def begin(self, sequence: Running, namespace: Namespace) -> None:
        """`sequence` continues the session, its blocks in `namespace`."""
        self._running, self._space = sequence, namespace
        self.namespace = namespace.name
        self.adapter_version = sequence.adapter_version

    def end(self) -> None:
        """The sequence has ended: take its tokens over."""
        assert self._running is not None
        self.token_ids = list(self._running.token_ids)
        self.logprobs = [*self.logprobs, *self._running.logprobs]
        self._running = None

    @property
    def running(self) -> Running | None:
        """The sequence that continues it now."""
        return self._running

    def copy(self, sample: int) -> Session:
        """The same tokens, nothing kept, another random stream."""
        running, copy = self._running, Session(self.token_ids, (self.stream[0], sample), self.seed)
        copy.logprobs = list(self.logprobs)
        copy.adapter_version, copy.namespace = self.adapter_version, self.namespace
        if running is not None:
            copy.token_ids = list(running.token_ids)
            copy.logprobs += running.logprobs
        return copy


class Kept:
    """Blocks of a session at rest, a reference held on each."""

    __slots__ = ("blocks", "namespace", "num_computed", "resting")

    def __init__(self, resting: Resting, namespace: Namespace, blocks: list[int], num_computed: int) -> None:
        self.resting = resting
        self.namespace = namespace
        self.blocks = blocks
        self.num_computed = num_computed


class Resting:
    """The sessions at rest that have blocks; those that rest longest give theirs up first.

    What is given up stays findable as any prefix, until its memory is used.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._sessions: OrderedDict[Session, None] = OrderedDict()

    def keep(self, session: Session, namespace: Namespace, blocks: list[int], num_computed: int) -> None:
        """Hold the first `num_computed` tokens of `blocks` for a session."""
        own = blocks[: -(-num_computed // KV_BLOCK)]
        self._blocks.acquire(own)
        session._kept = Kept(self, namespace, own, num_computed)
        self._sessions[session] = None

    def share(self, session: Session, copy: Session) -> None:
        """Hold for `copy` what `session` has by now, running or at rest."""
        running, kept = session._running, session._kept
        if running is not None and running.slot >= 0:
            assert session._space is not None
            self.keep(copy, session._space, running.blocks, running.num_computed)
        elif kept is not None:
            self.keep(copy, kept.namespace, kept.blocks, kept.num_computed)

    def held(self, session: Session | None) -> Kept | None:
        """What is held for a session."""
        return None if session is None else session._kept

    def drop(self, session: Session) -> None:
        """Let go of what is held for a session."""
        kept, session._kept = session._kept, None
        del self._sessions[session]
        assert kept is not None
        self._blocks.release(kept.blocks)

    def drop_oldest(self) -> bool:
        """Let go of what the session holds that rests longest; False if none does."""
        if self._sessions:
            self.drop(next(iter(self._sessions)))
            return True
        return False

    def drop_retired(self) -> None:
        """Let go of everything in namespaces that are gone."""
        for session in list(self._sessions):
            if session._kept is not None and not session._kept.namespace.alive:
                self.drop(session)

    def forget(self) -> None:
        """The blocks are gone, whoever holds them."""
        for session in self._sessions:
            session._kept = None
        self._sessions.clear()
