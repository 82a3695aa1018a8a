"""`compile`: the budget acts where it should and everything is put back; no claim about speed on a CPU."""

import pytest
import torch
from torch._functorch import config

from gctutor.policies import PolicyError, parse
from gctutor.workload import Workload


def test_names_and_what_they_recompute():
    assert str(parse("compile:1")) == "compile"
    assert parse("compile:1") == parse("compile")
    kinds = [parse(text).layers(1)[0] for text in ("compile", "compile:0.5")]
    assert [kind.recomputes for kind in kinds] == [False, True]
    assert not any(kind.traceable for kind in kinds)


@pytest.mark.parametrize("text", ["compile:2", "compile:half", "compile:0.5@0-1;compile:0.2@2-3"])
def test_budgets_that_make_no_sense_are_refused(text):
    with pytest.raises(PolicyError):
        parse(text)


def test_the_budget_is_set_for_the_block_and_put_back(tiny):
    model = tiny()
    before = config.activation_memory_budget
    with parse("compile:0.5").applied(model):
        assert config.activation_memory_budget == 0.5
        assert all(layer._compiled_call_impl for layer in model.model.layers)
    assert config.activation_memory_budget == before
    assert not any("_compiled_call_impl" in layer.__dict__ for layer in model.model.layers)


def test_a_block_in_which_nothing_was_compiled_is_an_error(tiny):
    with parse("compile:0.5").applied(tiny()) as applied:
        pass
    with pytest.raises(PolicyError, match="budget"):
        applied.verify(set())


def test_without_a_compiler_there_is_one_sentence(tiny, monkeypatch):
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def missing():
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    with pytest.raises(PolicyError, match=r"needs a C\+\+ compiler, and none is here: install g\+\+"):
        parse("compile").applied(tiny()).__enter__()
    assert config.activation_memory_budget == 1


def test_ligers_kernels_are_refused_on_a_cpu():
    with pytest.raises(PolicyError, match="Liger"):
        parse("compile").refuse(Workload("nano", seqlen=16, kernels="liger"), "cpu")


def compiled_saves(loss):
    """Bytes that the compiled layers' backward nodes hold."""
    nodes, queue, storages = set(), [loss.grad_fn], {}
    while queue:
        node = queue.pop()
        if node is None or node in nodes:
            continue
        nodes.add(node)
        if "Compiled" in type(node).__name__:
            for tensor in node.saved_tensors:
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        queue += [following for following, _ in node.next_functions]
    return sum(storages.values())


@pytest.mark.slow
def test_a_smaller_budget_keeps_less_and_gradients_stay(tiny, step):
    from gctutor.policies.compiled import _require_compiler

    try:
        _require_compiler("compile")
    except PolicyError as error:
        pytest.skip(str(error))
    model, ids = tiny(), torch.arange(32).view(2, 16)
    expected = step(model, ids)
    saved = []
    for text in ("compile", "compile:0.5", "compile:0"):
        with parse(text).applied(model) as applied:
            model.zero_grad()
            loss = model(input_ids=ids, labels=ids).loss
            saved.append(compiled_saves(loss))
            loss.backward()
        applied.verify(set())
        torch.testing.assert_close({n: p.grad for n, p in model.named_parameters()}, expected.grads)
    assert saved[0] > saved[1] > saved[2] > 0
    assert step(model, ids).equals(expected)
