"""Where a step's time goes, by group of operators: finch's recipe without its two largest gains in turn, and torchtune's stock recipe.

    python -m benchmarks.profile --data DATA [--model stories260k|smollm2] [--model-dir SMOLLM2]

torch.profiler's own time of each operator on the CPU, milliseconds per step, 16 TOFU rows. Profiling slows a step down. The last line is
a step without it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.processes import machine, print_rows
from benchmarks.speed.blocks import Contender
from benchmarks.speed.contenders import CONTENDERS, ROWS, arguments_parser, finch_recomputed, settings_of

STEPS = 2  # profiled, and as many without profiling

COLUMNS: dict[str, Callable[..., None]] = {
    "finch": CONTENDERS["finch"],
    "logits recomputed": finch_recomputed,
    "padded": CONTENDERS["finch_padded"],
    "stock recipe": CONTENDERS["torchtune_single_device"],
}

ELEMENTWISE, REST = "norms, rotary, elementwise", "rest"
# The first entry of which an operator's name, or else that of the operators it runs inside, has a part.
_BY_NAME = {
    "optimizer, clipping": ("Optimizer.", "_fused_adamw", "foreach", "linalg_vector_norm", "clip_grad"),
    "attention": ("scaled_dot_product", "flash_attention", "PaddingFreeAttention"),
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::matmul", "aten::linear", "mkldnn_linear"),
    "loss": ("softmax", "logsumexp", "nll_loss", "cross_entropy", "TargetLogits"),
}
_ELEMENTWISE = (
    "add", "sub", "mul", "div", "neg", "pow", "rsqrt", "sqrt", "mean", "sum", "silu", "sigmoid", "exp", "log", "cat", "stack",
    "rms_norm", "layer_norm", "where", "copy", "clone", "contiguous", "sin", "cos", "gelu", "tanh", "relu", "fill",
)  # fmt: skip
GROUPS = ("matrix products", "attention", ELEMENTWISE, "loss", "optimizer, clipping", REST)


def group_of(names: Sequence[str]) -> str:
    """The group of an operator.

    Args:
        names: the operator's name, then those of the operators it runs inside, innermost first.
    """
    for name in names:
        for group, parts in _BY_NAME.items():
            if any(part in name for part in parts):
                return group
    own = names[0].removeprefix("aten::").rstrip("_")
    return ELEMENTWISE if own in _ELEMENTWISE else REST


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument("--model", choices=sorted(ROWS), default="stories260k")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = settings_of(options.model, options, folder)
        contenders = [Contender(title, program, settings, folder) for title, program in COLUMNS.items()]
        for contender in contenders:
            contender.run(1)
        profiled = [contender.run(STEPS, is_profiled=True).operators for contender in contenders]
        plain = [1000 * contender.run(STEPS).seconds / STEPS for contender in contenders]
        for contender in contenders:
            contender.close()
    print(f"{options.model}, 16 TOFU rows per step; {machine()}")
    lines: dict[str, list[float]] = {group: [0.0] * len(COLUMNS) for group in GROUPS}
    for column, operators in enumerate(profiled):
        for names, own in operators:
            lines[group_of(names)][column] += 1000 * own / STEPS
    lines["all operators"] = [sum(column) for column in zip(*lines.values(), strict=True)]
    lines["step, not profiled"] = plain
    print_rows([{"ms per step": title, **dict(zip(COLUMNS, line, strict=True))} for title, line in lines.items()])


if __name__ == "__main__":
    main()
