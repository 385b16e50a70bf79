"""The native Runner on a GPU: the GPU samples and judges, so only results cross to the host.

Owns its parts, and who of them hears of what: sequences, launcher, answers, drafts, plain decoding, early starts and
the warm-up. Does not own what they do. A part names by a protocol what it needs of this class, and this class does no
more than that and the protocols of `core/runner.py`. Invariant: whoever is about to run another step, or to change
tokens or pages, has the steps forgotten that were started ahead and do not match any longer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbranch.config import SpeculativeConfig
from specbranch.core.forest import ForestOrders, ForestStep, wants_forests
from specbranch.core.grammar import Guide
from specbranch.core.orders import Context, Receiver
from specbranch.core.pages import PAGE, Copy
from specbranch.core.request import Request, Spot
from specbranch.core.runner import (
    NO_MASKS,
    Ask,
    Done,
    Feed,
    Growing,
    Hear,
    Lanes,
    PlainStep,
    Proposal,
    Trial,
    Verdicts,
    VerifyWork,
)
from specbranch.core.sending import SendingLater
from specbranch.core.slots import TAIL
from specbranch.core.trees import Tree
from specbranch.core.warm_up import ForwardSizes, StepTime
from specbranch.models.cache.kv_memory import Table
from specbranch.models.forward.decoder import Decoder
from specbranch.models.forward.features import Fuse
from specbranch.models.forward.step_rows import Rows
from specbranch.models.forward.transfer import Reading
from specbranch.models.gpu import asking
from specbranch.models.gpu.answers import Answers
from specbranch.models.gpu.choice import Chooser
from specbranch.models.gpu.decode_rows import DecodeRows
from specbranch.models.gpu.drafting import DeviceDrafts
from specbranch.models.gpu.early_starts import EarlyStarts
from specbranch.models.gpu.forest_rounds import ForestDecoder, joins
from specbranch.models.gpu.growing import TreeGrower
from specbranch.models.gpu.kernel_step import step_of
from specbranch.models.gpu.launching import StepLauncher
from specbranch.models.gpu.layout import CHUNK_STEP_ROWS, MOST_TOTAL_ROWS, Bucket, power_of_four, views
from specbranch.models.gpu.own_stream import DeviceStream
from specbranch.models.gpu.plain_decode import PlainDecoder, Texts
from specbranch.models.gpu.shaped_decode import ShapedSampler, Unchosen
from specbranch.models.gpu.step import GpuStep, Graphs, Ran
from specbranch.models.gpu.step_warm_up import StepWarmUp
from specbranch.models.gpu.stream_clock import DeviceMoment
from specbranch.models.gpu.trees import DeviceTree
from specbranch.models.gpu.warm_up import KERNEL_WATCH, run_outside_graphs
from specbranch.models.runners.native import NativeRunner
from specbranch.models.runners.pending_prefill import PendingChunk
from specbranch.models.runners.sequences import OpenSequence
from specbranch.models.runners.torch_runner import PREFILL_CHUNKS, ProbeNetwork
from specbranch.models.runners.weak_host import weakly
from specbranch.models.sampling.logit_rows import TensorRow


class GpuRunner(NativeRunner):
    """A Runner whose steps sample and judge on the GPU; on a CPU, as in tests, they run without CUDA graphs."""

    def __init__(self, decoder: Decoder, context_length: int, tail: int = TAIL, pages: int | None = None) -> None:
        super().__init__(decoder, context_length, tail, pages)
        self._fused = None
        spare, most_pages = self.pool.pages * PAGE, -(-(context_length + tail) // PAGE)
        self.stream = DeviceStream(self, self.device)
        self.transfer.stream = self.stream.cuda
        with self.stream.in_turn():  # weights and pages were made on the caller's stream
            self.graphs = self._make_graphs(step_of(decoder, self.memory), most_pages)
            self.graphs.choose_with(self._chooser())
        KERNEL_WATCH.count_for(self.graphs)
        self._set_prefill_sizes()
        host = weakly(self)
        self.launcher = StepLauncher(
            decoder, self.memory, self.sequences, self.transfer, self.graphs, self.stream, spare, host
        )
        with self.stream.in_turn():
            self._grower = TreeGrower(self.graphs, most_pages, spare, self.transfer)
        self.plain = PlainDecoder(host)
        self.forest: ForestDecoder | None = None  # made for the first round of draft trees on the device
        self.early = self._make_early_starts()
        self.drafts = DeviceDrafts(self.launcher, self.sequences, self._grower, self.early, host)
        self.answers = Answers(decoder, self.launcher, self.sequences, self.early, host)
        self.warming = StepWarmUp(self.graphs, self.stream, self._about(most_pages), host)

    def _make_graphs(self, step: GpuStep, most_pages: int) -> Graphs:
        return Graphs(step, most_pages)

    def _make_early_starts(self) -> EarlyStarts:
        return EarlyStarts(self.launcher, self.sequences, self.context_length, weakly(self))

    def _chooser(self) -> Chooser:
        columns = self.decoder.columns
        return Chooser(self.graphs.step.picks, self.sampler.width(columns), columns)

    def _set_prefill_sizes(self) -> None:
        # Where a step takes rows of prompts, a prompt may be cut anywhere.
        takes_chunks = self.graphs.step.takes_chunks
        self.prefill_chunk = 1 if takes_chunks else PREFILL_CHUNKS["cuda"]
        self.most_prefill = MOST_TOTAL_ROWS - CHUNK_STEP_ROWS[2] if takes_chunks else None

    def _about(self, most_pages: int) -> dict[str, Any]:
        """Return what decides which steps a model has, and how they are compiled."""
        cuda = self.device.type == "cuda"
        device = torch.cuda.get_device_name(self.device) if cuda else self.device.type
        shape = {name: value for name, value in asdict(self.architecture).items() if isinstance(value, int | float)}
        made = {"dtype": str(self.dtype), "weights": self.weights, "pages": most_pages}
        return {"device": device, "shape": shape, **made}

    # --- answers and drafts ---

    def propose(self, work: Sequence[Feed], asks: Sequence[Ask]) -> list[Proposal]:
        """Compute new nodes, and return proposals after them, or after nodes computed before."""
        return self.answers.propose(work, asks)

    def verify(self, work: Sequence[Feed], trials: Sequence[Trial]) -> Verdicts:
        """Start to compute and judge new nodes; a call of the verdicts waits for the device."""
        work = [feed for feed in work if feed.tokens]
        return self.answers.verify(work, trials, self._wanted(work))

    def grow(self, growing: Growing, done: Done) -> Tree | None:
        """Grow a tree on the device; None if the caller has to grow it step by step."""
        return self.drafts.grow(growing, done)

    def run_ahead(self, lanes: Lanes, hear: Hear) -> int:
        """Draft in lanes: each step starts with the device's own tokens, before the host has read the last step."""
        return self.drafts.run_ahead(lanes, hear)

    def feed(self, work: Sequence[Feed]) -> None:
        """Compute new nodes of several sequences in one forward."""
        with self.stream.here():
            super().feed(work)

    def score(self, work: Sequence[Feed]) -> list[list[TensorRow]]:
        """Compute new nodes; returns one row for each, which the caller's stream may read."""
        with self.stream.in_turn():
            return super().score(work)

    def margin(self, seq: int, node: int, first: int, second: int) -> float:
        """Return by how many logits `first` is preferred to `second` after a node; 0 is a tie."""
        with self.stream.here():
            return super().margin(seq, node, first, second)

    def limit(self, vocabulary: int) -> None:
        """Never sample a token with this id or a higher one, as the other model does not know it."""
        super().limit(vocabulary)
        with self.stream.in_turn():
            self.graphs.choose_with(self._chooser())

    def probe(self, layers: int, network: ProbeNetwork | None) -> None:
        """Attach the output of a network over hidden states to every verdict; see `TorchRunner`."""
        with self.stream.in_turn():
            super().probe(layers, network)

    # --- early starts ---

    @property
    def begun(self) -> DeviceMoment | None:
        """When the last verify or tree started, if that may have been before it was ordered."""
        return self.early.begun

    @property
    def grown_at(self) -> DeviceMoment | None:
        """When the last drafted tree was complete on the device; None if the last draft was no tree."""
        return self.early.grown_at

    def make_ready(self, seq: int, done: Done) -> None:
        """Pack steps for texts that `read_ahead` may get."""
        self.early.make_ready(seq, done)

    def read_ahead(self, feed: Feed) -> bool:
        """Compute the rest of a text, and sample what follows it; False if that is not possible in a graph."""
        return self.early.read_ahead(feed)

    def receiver(self, seq: int, on: Context, sending: SendingLater) -> Receiver | None:
        """Return the receiver of a tree that grows behind a text, of which all but the last token is committed."""
        return self.early.receiver(seq, on, sending)

    def warm_up_receiver(self, draft: object) -> None:
        """Get ready for trees of a draft on the same device, which this model verifies where they have grown."""
        if isinstance(draft, GpuRunner) and draft.device == self.device:
            with self.stream.in_turn():
                self.early.warm_up_receiver(draft.tree)
        if self.grows_with(draft):
            with self.stream.in_turn():
                self._warm_up_forest(draft)

    def launch_receiver(self, draft: object | None) -> None:
        """Launch the kernels that bring a draft's tree to a step, if both are on one device."""
        if isinstance(draft, GpuRunner) and draft.device == self.device:
            self.early.launch_receiver(draft.tree)
        self._warm_up_forest(draft)

    def _warm_up_forest(self, draft: object | None) -> None:
        if self.grows_with(draft) and self.device.type == "cuda":
            assert draft is None or isinstance(draft, GpuRunner)
            config = SpeculativeConfig()
            self._forest_with(draft).warm_up((config.ngram_max, config.ngram_min))

    @property
    def tree(self) -> DeviceTree:
        """The tree that grows on this model's device."""
        return self._grower.tree

    # --- plain decoding; see `DecodesBatches` and `DecodeLauncher` ---

    @torch.inference_mode()
    def decode(
        self,
        texts: Texts,
        going_on: Collection[int],
        verify: VerifyWork | None = None,
        masks: Mapping[int, Guide] = NO_MASKS,
    ) -> PlainStep | None:
        """Decode one token of each sequence, and launch the next step, with the rows of `verify`."""
        self.early.forget()
        with self.stream.here():
            return self.plain.decode(texts, going_on, verify, masks)

    def decodes(self, seq: int, length: int) -> bool:
        """True if the device samples the token behind `length` tokens by itself; so it does for all later ones."""
        request = self._requests[seq]
        if self.decoder.columns is None:
            return not request.by_ratio
        params = request.params  # a reduced head samples in the graph alone, never behind it
        in_graph = asking.is_chosen_in_graph(Spot(request, length, list))
        return in_graph and params.logprobs is None and not params.min_tokens

    def fits(self, texts: Texts, verify: VerifyWork | None = None) -> bool:
        """True if a step takes all these sequences, and the one behind it takes them and `verify`."""
        return self.plain.fits(texts, verify)

    def join(self, seq: int, token: int) -> None:
        """Give a sequence that begins to decode a row in the next decode step."""
        self.plain.join(seq, token)

    def sequence(self, seq: int) -> OpenSequence | None:
        """Return a sequence if it is open."""
        return self.sequences.get(seq)

    def reserve(self, seq: int, start: int, stop: int) -> Table:
        """Make KV slots writable, or raise CacheFull; returns the page table."""
        return self.sequences.reserve(seq, start, stop)

    def commit(self, tokens: Mapping[int, int]) -> None:
        """Append a token to the prefix of each sequence, once a step has computed them."""
        self.sequences.commit(tokens)
        for seq in tokens:
            self._rows[seq].clear()

    def fits_one_step(self, rows: int, longest: int) -> bool:
        """True if so many rows are one step; `longest`: tokens of the longest sequence."""
        return self.launcher.fits_one_step(rows, longest)

    def launch_decode(
        self, rows: DecodeRows, verify: VerifyWork | None = None
    ) -> tuple[Reading | Unchosen, Verdicts | None]:
        """Launch a plain decode step with the rows of `verify`; it also computes prefill that was put off.

        Returns its results and its verdicts, in flight. If a row has a grammar, the step's tokens are not chosen yet.
        """
        if verify is None:
            ran, bucket = self.launcher.launch_decode(rows)
            results = None if rows.shaped else self.launcher.read_later(ran, len(rows))
            return self._decoded(rows, ran, bucket, results), None
        layers = self._wanted(verify.work)
        with self.sequences.appending(verify.work) as parts:
            beside = self.answers.beside(verify, parts, layers)
            ran, bucket = self.launcher.launch_decode(rows, beside.rows, layers)
            results = self.launcher.read_later(ran, len(rows) + len(beside.rows))  # before others are sampled
            decoded = self._decoded(rows, ran, bucket, results)
            return decoded, self.answers.verdicts_beside(beside, ran, results, len(rows))

    def _decoded(self, rows: DecodeRows, ran: Ran, bucket: Bucket, results: Reading | None) -> Reading | Unchosen:
        """Return the results of decode rows, or how to choose them; `results`: as the graph has sampled them."""
        if results is not None and not rows.shaped:
            rows.before, rows.sources = None, ()  # needed no longer
            return results
        choosing = views(self.graphs.input, bucket).choosing
        assert choosing is not None
        sampler = ShapedSampler(self.transfer, self.sampler.vocabulary, self.answers.picked, self.graphs.step.picks)
        scored = sampler.taken(rows, ran, choosing)
        return Unchosen(sampler, rows, scored) if rows.is_masked else sampler.read_later(rows, scored)

    # --- rounds of the forest; see `GrowsForests` ---

    def grows_with(self, draft: object | None) -> bool:
        """True if the device can go from verify to verify by itself, with this draft on it."""
        models = [self, draft] if draft is not None else [self]
        return wants_forests(self.device.type == "cuda") and all(
            isinstance(model, GpuRunner)
            and model.device == self.device
            and model.vocabulary >= self.vocabulary  # a step of the draft computes any token of the text
            and (model.graphs.step.moves or self.device.type == "cpu")
            for model in models
        )

    def joins_forest(self, seq: int, length: int) -> bool:
        """True if the device decodes a sequence so, behind `length` tokens; then also behind more."""
        request = self._requests[seq]
        return joins(request, asking.is_chosen_in_graph(Spot(request, length, list)))

    @torch.inference_mode()
    def decode_forest(self, orders: ForestOrders, draft: object | None) -> ForestStep | None:
        """Make a round of draft trees on the device, and launch the next one."""
        assert draft is None or isinstance(draft, GpuRunner)
        self.drop_steps()
        return self._forest_with(draft).decode(orders)

    def _forest_with(self, draft: GpuRunner | None) -> ForestDecoder:
        if self.forest is None or not self.forest.is_with(draft):
            self.leave_forest()
            self.forest = ForestDecoder(weakly(self), draft)
        return self.forest

    def finish_growing(self) -> None:
        """Launch what a round in flight still wants of the draft."""
        if self.forest is not None:
            self.forest.finish_growing()

    def leave_forest(self) -> None:
        """Forget what is launched."""
        if self.forest is not None:
            self.forest.leave()

    def drop_steps(self) -> None:
        """Forget steps that were started ahead, except those of the forest."""
        self.early.forget()
        self.plain.forget_all()

    # --- what the parts need of their runner ---

    @property
    def probe_network(self) -> ProbeNetwork | None:
        """The network whose output comes with verdicts."""
        return None if self._probe is None else self._probe[1]

    @property
    def probe_layers(self) -> int:
        """How many layers' hidden states that network reads."""
        return 0 if self._probe is None else self._probe[0]

    def request(self, seq: int) -> Request:
        """Return the request of a sequence."""
        return self._requests[seq]

    def row(self, seq: int, node: int) -> TensorRow:
        """Return the logits after a node."""
        return self._rows[seq][node]

    def hold(self, work: Sequence[Feed], block: Tensor, states: Tensor | None) -> None:
        """Keep the rows of a forward, as later calls may need them."""
        made = iter(range(block.shape[0]))
        for feed, start in zip(work, self.sequences.first_nodes(work), strict=True):
            kept = (
                (start + at, TensorRow(block, next(made), self.decoder.columns, states))
                for at in range(len(feed.tokens))
            )
            self._rows[feed.seq].update(kept)

    def forget_rows(self, seq: int) -> None:
        """Forget the logits of a sequence."""
        self._rows[seq].clear()

    def drop_ahead(self) -> None:
        """Forget steps that were started ahead: another one is about to run."""
        self.early.forget_step()
        self.plain.forget_all()
        self.leave_forest()

    def move_kv(self, seq: int, moves: np.ndarray, lowest_written: int) -> None:
        """Move KV slots with the next step, or before it; features now, as the draft reads them before that."""
        self.launcher.move_kv(seq, moves, lowest_written)
        if self.features is not None:
            with self.stream.here():
                self.features.memory.move(*self.transfer.up({"moves": moves})["moves"])

    def write_features(self, fuse: Fuse) -> None:
        """Write features within every step; see `NativeRunner`."""
        with self.stream.in_turn():
            super().write_features(fuse)
            self.graphs.step.features = self.features
            self.graphs.step.only_kernels = False  # torch computes the features
            self.graphs.choose_with(self._chooser())  # graphs that write none are dropped

    def in_turn(self) -> AbstractContextManager[Any]:
        """Within this context work goes to this model's stream, in the order of the caller's."""
        return self.stream.in_turn()

    def copy_pages(self, copies: Sequence[Copy]) -> None:
        """Copy pages of the pool, once the pending moves are made; a step in flight does not read the copies."""
        self.early.forget_step()
        with self.stream.here():
            self.launcher.up({})
            super().copy_pages(copies)

    def rewinding(self, seq: int) -> None:
        """Forget steps in flight: a sequence is about to be rolled back."""
        self.early.forget_step()
        self.plain.forget(seq)
        if self.forest is not None:
            self.forest.forget(seq)

    def flush(self) -> None:
        """Compute all prefill that was put off; see `NativeRunner`."""
        if self.sequences.pending:
            with self.stream.here():
                super().flush()

    def _extend(self, seq: int, tokens: Sequence[int]) -> None:
        with self.stream.here():
            super()._extend(seq, tokens)

    def _close(self, seq: int) -> None:
        self.early.close(seq)
        self.plain.forget(seq)  # the rows of other sequences stay valid
        if self.forest is not None:
            self.forest.forget(seq)
        super()._close(seq)

    def _forward(self, work: list[Rows]) -> tuple[Tensor, Tensor | None]:
        return self.launcher.run(work, self.state_layers)

    def _compute_chunks(self, pending: Sequence[PendingChunk]) -> None:
        if self.graphs.step.takes_chunks:
            self.launcher.compute_chunks(pending)
            return
        self.launcher.up({})
        super()._compute_chunks(pending)

    # --- warm-up; see `WarmsUp`, `PadsForwards` and `TimesForwards` ---

    @property
    def note(self) -> Callable[[], DeviceMoment] | None:
        """A function that notes when the device has done all work given to it so far; None on a CPU."""
        return None if self.stream.clock is None else self.stream.clock.note

    @property
    def late_captures(self) -> int:
        """How many graphs were captured, or kernels compiled, when a step needed them."""
        return self.graphs.late

    @late_captures.setter
    def late_captures(self, count: int) -> None:
        self.graphs.late = count

    def padded(self, rows: int) -> int:
        """Return the padded number of rows of a step."""
        return max(power_of_four(rows), self.graphs.step.least.rows)

    def warm_up(self, sizes: ForwardSizes) -> None:
        """Capture and time the kinds of steps that forwards of these sizes can have; on a CPU there are none."""
        self.warming.warm_up(sizes)

    def start_compiling(self, sizes: ForwardSizes, draft: object | None = None) -> None:
        """Start to compile the kernels that `warm_up` needs; `draft`: the model whose trees this one verifies."""
        self.warming.start_compiling(sizes, draft)

    def stop_compiling(self) -> None:
        """Compile no more: a process that ends would wait for its threads."""
        self.warming.stop_compiling()

    def step_times(self) -> list[StepTime]:
        """Return the times of all kinds of steps that a warm-up has captured, the smallest first."""
        return self.warming.step_times()

    def forward_seconds(self, rows: int, prompt_tokens: int = 0) -> float | None:
        """Return the seconds of a forward of this many decode rows and prompt tokens; None: it was not timed."""
        return self.warming.forward_seconds(rows, prompt_tokens)

    def save_kinds(self) -> None:
        """Save which kinds of steps were run, so that the next process captures them first."""
        self.warming.save_kinds()

    def warm_up_kernels(self) -> None:
        """Compile the kernel that chooses a tree's first step: it runs outside graphs."""
        self._grower.warm_up()

    def run_outside_graphs(self) -> None:
        """Run once what no graph contains; see `warm_up.py`."""
        run_outside_graphs(self)
