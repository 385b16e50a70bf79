"""Sequences over pages that are fed through packed steps, for tests on CPU and GPU. `Slots` alone says what a row
sees."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from specbranch.core.pages import PAGE, Pool
from specbranch.core.slots import ROOT, Slots
from specbranch.models.cache.kv_memory import Memory, Table
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.matrix import Matrix
from specbranch.models.files.weights import LayerWeights, Weights
from specbranch.models.forward.decoder import Decoder
from specbranch.models.forward.step_rows import Rows, rows_of_chunk, rows_of_nodes, split_into_steps
from specbranch.models.gpu.attention import Attend
from specbranch.models.gpu.layout import pack
from specbranch.models.gpu.step import GpuStep, Graphs

PAGES = 24


class PagedSequence:
    """One sequence: its table, and who lies where."""

    def __init__(self, table: Table, slots: Slots) -> None:
        self.table, self.slots = table, slots

    def read(self, tokens: Sequence[int]) -> Rows:
        """Append to the prefix."""
        kv_slots = self.slots.extend(tokens)
        self.table.reach(kv_slots.stop)
        return rows_of_chunk(self.table, tokens, kv_slots.start)

    def grow(self, tokens: Sequence[int], parents: Sequence[int]) -> Rows:
        """Add nodes to the tail."""
        nodes = self.slots.grow(tokens, parents)
        self.table.reach(len(self.slots))
        return rows_of_nodes(self.table, self.slots, nodes)


def expected_slots(seq: PagedSequence, node: int) -> list[int]:
    """The flat KV slots of a node's ancestors and itself, by the definition."""
    kv_slots = [*range(len(seq.slots.prefix)), *(seq.slots.slot_of(one) for one in seq.slots.path(node))]
    return [seq.table.pages[slot // PAGE] * PAGE + slot % PAGE for slot in kv_slots]


def some_work(seed: int) -> tuple[Pool, list[tuple[PagedSequence, Rows]]]:
    """Some sequences with trees in their tails, some of them forks of others, and the rows that were fed last."""
    choose = random.Random(seed)
    pool, work = Pool(64), list[tuple[PagedSequence, Rows]]()
    pool.take(choose.randrange(5))
    for _ in range(choose.randint(1, 5)):
        seq = (
            _fork(choose.choice(work)[0]) if work and choose.random() < 0.4 else PagedSequence(Table(pool), Slots(4096))
        )
        seq.slots.truncate(len(seq.slots.prefix))
        seq.read([1] * choose.choice([0, 1, 20, 31, 64, 100, 255, 300, 700]))
        for _ in range(choose.randint(1, 3)):
            size = len(seq.slots.tokens)
            count = choose.randint(1, 20)
            lean = choose.choice([0, 3, 40])  # 0: chains; 40: whatever parent
            parents = [max(ROOT, size + i - 1 - choose.randint(0, lean)) for i in range(count)]
            seq.table.reach(len(seq.slots) + count)
            seq.table.own(len(seq.slots), len(seq.slots) + count, lambda copies: None)
            rows = seq.grow([choose.randrange(99) for _ in parents], parents)
        work.append((seq, rows))
    return pool, work


def _fork(seq: PagedSequence) -> PagedSequence:
    slots = Slots(4096)
    slots.extend(seq.slots.prefix)
    return PagedSequence(seq.table.fork(len(slots)), slots)


class Stepper:
    """A model that runs packed steps over its own pages."""

    def __init__(
        self, decoder: Decoder, device: str, dtype: torch.dtype, attend: Attend | None = None, capture: bool = False
    ) -> None:
        self.pool = Pool(PAGES)
        self.memory = Memory(decoder.arch, PAGES + 1, torch.device(device), dtype)
        self.graphs = Graphs(GpuStep(decoder, self.memory, attend), PAGES, capture)

    def open(self, prefix: Sequence[int] = ()) -> PagedSequence:
        """Start a sequence and read its prefix."""
        seq = PagedSequence(Table(self.pool), Slots(4096))
        if prefix:
            self.score([seq.read(prefix)])
        return seq

    def score(self, work: Sequence[Rows]) -> torch.Tensor:
        """The logits of all rows, in as many steps as it takes."""
        found = []
        for some in split_into_steps(work, min(self.graphs.step.most_rows, 128)):
            packed, bucket = pack(some, PAGES * PAGE, least=self.graphs.step.least)
            found.append(self.graphs.run(packed, bucket)[: sum(len(rows.tokens) for rows in some)].clone())
        return torch.cat(found)


def decoder_of(model: PreTrainedModel, device: str, dtype: torch.dtype) -> Decoder:
    """Build the native decoder of a model of transformers."""
    arch = Architecture.from_config(model.config.to_dict())
    state = {name: tensor.detach().to(device, dtype) for name, tensor in model.state_dict().items()}

    def matrix(index: int, *names: str) -> Matrix:
        weights, biases = (
            [state.get(f"model.layers.{index}.{name}.{part}") for name in names] for part in ("weight", "bias")
        )
        return Matrix(torch.cat(weights), None if biases[0] is None else torch.cat(biases))

    def layer(index: int) -> LayerWeights:
        def vector(name: str) -> torch.Tensor | None:
            return state.get(f"model.layers.{index}.{name}.weight")

        qkv = matrix(index, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        gate_up = matrix(index, "mlp.gate_proj", "mlp.up_proj")
        out, down = matrix(index, "self_attn.o_proj"), matrix(index, "mlp.down_proj")
        norms = [
            vector(name)
            for name in ("input_layernorm", "self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm")
        ]
        return LayerWeights(norms[0], qkv, norms[1], norms[2], out, norms[3], gate_up, down)

    layers = tuple(layer(index) for index in range(arch.layers))
    weights = Weights(
        state["model.embed_tokens.weight"], layers, state["model.norm.weight"], Matrix(state["lm_head.weight"])
    )
    return Decoder(arch, weights, 1024)


def chain_with_siblings(tokens: Sequence[int], behind: int) -> tuple[list[int], list[int], list[int]]:
    """Nodes of a chain, each with `behind` garbage siblings before it: tokens, parents, and which nodes are the
    chain."""
    fed: list[int] = []
    parents: list[int] = []
    chain: list[int] = []
    for token in tokens:
        parent = chain[-1] if chain else ROOT
        fed += [(token + 1 + i) % 131 for i in range(behind)] + [token]
        parents += [parent] * (behind + 1)
        chain.append(len(fed) - 1)
    return fed, parents, chain
