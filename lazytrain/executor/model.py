"""The model as the executor sees it: units with flat layouts, modules without weights, the embedding's arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from lazytrain.executor.device import Template
from lazytrain.executor.layout import Layout
from lazytrain.models.architecture import Architecture, Context

HEAD = "lm_head"  # name of the LM head inside its unit, beside the final norm's parameters


class Network:
    """Units 0 (embedding), 1..L (layers), L+1 (final norm, and the head where it is not tied to the embedding)."""

    def __init__(self, architecture: Architecture):
        self.architecture = architecture
        self.tied: bool = architecture.tied
        self.hidden_size: int = architecture.hidden_size
        self.vocab_size: int = architecture.vocab_size
        L = architecture.n_layers
        table = (self.vocab_size, self.hidden_size)
        norm = architecture.build_final_norm(torch.float32, "meta")
        head = {name: tuple(p.shape) for name, p in norm.named_parameters()}
        head_names = dict(architecture.norm_parameter_names())
        if not self.tied:
            head[HEAD], head_names[HEAD] = table, architecture.head_name
        by_kind: dict[str, Layout] = {}
        for layer in range(L):
            if (kind := architecture.kind_of(layer)) not in by_kind:
                by_kind[kind] = Layout(architecture.parameter_shapes(layer))
        self.layouts = [Layout({"table": table}), *(by_kind[architecture.kind_of(i)] for i in range(L)), Layout(head)]
        self.names = [
            {"table": architecture.embedding_name},
            *(architecture.parameter_names(i) for i in range(L)),
            head_names,
        ]

    def own(self, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """A state dict's tensors without the second name of a tied table."""
        second = self.architecture.head_name if self.tied else None
        return ((name, tensor) for name, tensor in state.items() if name != second)

    def templates(self, dtype: torch.dtype) -> dict[int, Template]:
        """A module for each layer and the final norm; layers of one kind share one."""
        by_layout: dict[int, Template] = {}
        templates = {}
        for unit in range(1, len(self.layouts) - 1):
            layout = self.layouts[unit]
            if id(layout) not in by_layout:
                block = self.architecture.build_block(unit - 1, dtype, "meta")
                by_layout[id(layout)] = Template(block.train(), [p.local for p in layout.places])
            templates[unit] = by_layout[id(layout)]
        head = len(self.layouts) - 1
        norm = self.architecture.build_final_norm(dtype, "meta")
        templates[head] = Template(norm, [None if p.local == HEAD else p.local for p in self.layouts[head].places])
        return templates

    def context(self, batch: int, seq_len: int, dtype: torch.dtype, device: torch.device) -> Context:
        """What every layer call needs beside the hidden state: positions."""
        return self.architecture.context(batch, seq_len, device, dtype)

    def run_block(self, block: nn.Module, hidden: Tensor, context: Context) -> Tensor:
        """[b, S, d] -> [b, S, d]"""
        return self.architecture.run_block(block, hidden, context)

    def embed(self, table: Tensor, ids: Tensor) -> Tensor:
        """ids int64 [b, S] on the table's device -> [b, S, d]"""
        return self.architecture.embed(ids, table)

    def embed_backward(self, table_gradient: Tensor, ids: Tensor, gradient: Tensor) -> None:
        """Adds the rows of ``gradient`` [b, S, d] into the table's gradient; ``ids`` [b, S] on the CPU.

        Equal ids are first summed in fp32, so that a bf16 gradient is rounded once a token id, not once a token. The
        padding id of the model gets no gradient, as in PyTorch's embedding.
        """
        unique, position = torch.unique(ids.flatten(), return_inverse=True)
        device = gradient.device
        rows = torch.zeros(unique.numel(), gradient.shape[-1], dtype=torch.float32, device=device)
        rows.index_add_(0, position.to(device), gradient.reshape(-1, gradient.shape[-1]).float())
        padding = self.architecture.padding_id
        if padding is not None:
            rows[(unique == padding).to(device)] = 0.0
        table_gradient.index_add_(0, unique.to(device), rows.to(table_gradient.dtype))
