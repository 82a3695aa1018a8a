"""Liger's kernels for real on a CPU, through Triton's interpreter: run as a script, in a process of its own.

    TRITON_INTERPRET=1 python tests/liger_interpreted.py FOLDER_OF_A_QWEN3 FOLDER_OF_A_LLAMA

Prints JSON: losses and worst gradient differences against Hugging Face's modules, and traced activation bytes.
"""

import gc
import json
import sys
from unittest import mock

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from gctutor import parse
from gctutor.tracing import trace_step
from gctutor.workload import Workload, build, inputs


def teach_the_interpreter():
    """Pass Python floats as float32 tensors, as the compiler does, and give it a reciprocal square root."""
    from liger_kernel.ops import rms_norm

    convert = interpreter._implicit_cvt

    def with_floats(value):
        if not isinstance(value, float):
            return convert(value)
        return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32)

    interpreter._implicit_cvt = with_floats
    rms_norm.rsqrt = lambda value: tl.math.rsqrt(
        value
    )  # looked up anew: the interpreter swaps the language while it runs


def collect(*_):
    """The interpreter leaves the arguments of its last launch in a cycle."""
    gc.collect()


def step(workload, policy="none"):
    """Loss, gradients and traced activation bytes of one step."""
    model, batch = build(workload), inputs(workload)
    model.register_forward_hook(collect)
    with parse(policy).applied(model):
        traced = trace_step(model, batch).activation_bytes
        loss = model(**batch).loss
        loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}, traced


def worst(gradients, others):
    return max(float((g - others[name]).abs().max() / g.abs().max()) for name, g in gradients.items())


def compared(folder, kernels, policies):
    plain = Workload(folder, seqlen=8, precision="fp32")
    loss, gradients, _ = step(plain)
    found = {"hf": {"loss": loss}}
    for policy in policies:
        loss, others, traced = step(plain.replace(kernels=kernels), policy)
        found[policy] = {"loss": loss, "worst": worst(gradients, others), "activation_bytes": traced}
    return found


if __name__ == "__main__":
    teach_the_interpreter()
    qwen3, llama = sys.argv[1:]
    report = {"qwen3": compared(qwen3, "liger", ["none", "modules:all", "ops:mm,core_attn,-down_proj"])}
    with mock.patch("gctutor.policies.modules.refuse_overwritten"):
        report["llama"] = compared(llama, "liger:rope", ["none", "modules:all"])
    print(json.dumps(report))
