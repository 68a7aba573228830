"""What a compiled block keeps: attention is asked about, and kept before the products that are cheaper a byte."""

import pytest
import torch
import torch._functorch.config as partition
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd

from ltx_train.memory.keeping import use_in_partitioner

WIDTH, TOKENS = 64, 512


def block(layers, x):
    q, k, v = [layer(x).view(1, -1, 4, WIDTH // 4).transpose(1, 2) for layer in layers[:3]]
    attended = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(1, -1, WIDTH)
    return layers[4](torch.nn.functional.gelu(layers[3](attended))) + x


def test_attention_is_kept_first():
    pytest.importorskip("torch._inductor.custom_graph_pass", reason="this torch decides alone what is kept")
    counts = []

    def count(graph, inputs):
        counts.append(sum("flash_attention" in str(n.target) and "backward" not in str(n.target) for n in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    layers = [torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in range(5)]
    x = torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    with partition.patch(activation_memory_budget=0.5, activation_memory_budget_solver=partition.activation_memory_budget_solver):
        assert use_in_partitioner(partition)
        backend = aot_autograd(fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition)
        torch.compile(lambda x: block(layers, x), backend=backend)(x).sum().backward()
    assert counts == [1, 0], "attention runs in the forward pass alone"
    assert torch.allclose(x.grad, torch.autograd.grad(block(layers, x).sum(), x)[0], atol=1e-5)
