"""Weights and denominators against the definitions in plain float64, over layouts, packed rows and another library."""

import math

import numpy
import pytest
import torch
import torch.nn.functional as F

from finch.objectives import DFT, EAFT, FLOW, IGNORE_INDEX, STM, TALR, CrossEntropy, median

VOCAB = 23
LONGEST = 40


def all_objectives():
    """New ones for each test, under the names that ``definition`` uses."""
    plain = {kind.__name__: kind() for kind in (CrossEntropy, FLOW, DFT, STM, EAFT)}
    return {**plain, "TALR": TALR(tau="exact"), "TALR_constant": TALR(tau=0.7, w_min=0.2)}


# A minimal model: hidden states depend on the token and on its position in its sequence.


def parameters(seed):
    generator = torch.Generator().manual_seed(seed)
    options = {"generator": generator, "dtype": torch.float64, "requires_grad": True}
    rows = {"embedding": VOCAB, "position": LONGEST, "head": VOCAB}
    return {name: torch.randn(number, 5, **options) for name, number in rows.items()}


def logits_of(theta, batch):
    hidden = torch.tanh(theta["embedding"][batch["tokens"]] + theta["position"][batch["position_ids"]])
    return 0.7 * hidden @ theta["head"].T


def token_losses(logits, labels):
    return F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORE_INDEX, reduction="none")


def samples(lengths, without=0):
    """Tokens with shifted labels; about a third are ignored, and the last ``without`` samples have none at all."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for number, length in enumerate(lengths):
        tokens = torch.randint(VOCAB, (length,), generator=generator)
        labels = tokens.roll(-1)
        labels[torch.rand(length, generator=generator) < 0.35] = IGNORE_INDEX
        labels[-2] = tokens[-1]  # at least one
        labels[-1] = IGNORE_INDEX
        if number >= len(lengths) - without:
            labels[:] = IGNORE_INDEX
        made.append((tokens, labels))
    return made


def collate(rows, theta0, packed=False):
    """A padded micro-batch of rows, each a list of samples; with everything that any objective needs."""
    width = max(sum(len(tokens) for tokens, _ in row) for row in rows) + 2  # padding at every row's end
    empty = torch.zeros(len(rows), width, dtype=torch.long)
    batch = {"tokens": empty.clone(), "position_ids": empty.clone(), "labels": torch.full_like(empty, IGNORE_INDEX)}
    for number, row in enumerate(rows):
        # As torchtune pads a pack: positions continue from the last sequence.
        positions = [position for tokens, _ in row for position in range(len(tokens))]
        positions += range(positions[-1] + 1, positions[-1] + 1 + width - len(positions))
        batch["position_ids"][number] = torch.tensor(positions)
        for name, parts in zip(("tokens", "labels"), zip(*row, strict=True), strict=True):
            values = torch.cat(parts)
            batch[name][number, : len(values)] = values
    if packed:
        batch["input_pos"] = batch["position_ids"]
    with torch.no_grad():
        batch["pretrained_token_loss"] = token_losses(logits_of(theta0, batch), batch["labels"])
    return batch


def gradients(loss, theta):
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(theta.values()))])


def train_step(objective, ranks, theta, theta0):
    """One step of a training loop: ``ranks`` is a list of ranks, each a list of micro-batches.

    Returns loss and gradient, averaged over ranks as data parallelism does.
    """
    batches = [batch for rank in ranks for batch in rank]
    if isinstance(objective, FLOW):
        pretrained = [objective.sequence_losses(batch["pretrained_token_loss"], batch) for batch in batches]
        objective.tau = median(torch.cat(pretrained))
    logits = [logits_of(theta, batch) for batch in batches]
    losses = [token_losses(each, batch["labels"]) for each, batch in zip(logits, batches, strict=True)]
    current = [objective.sequence_losses(each.detach(), batch) for each, batch in zip(losses, batches, strict=True)]
    denominator = sum(objective.count(batch) for batch in batches)
    loss, gradient = 0, 0
    for batch, batch_logits, batch_losses in zip(batches, logits, losses, strict=True):
        if objective.statistic:
            batch["statistic"] = median(torch.cat(current))
        if "top_logits" in objective.needs:
            batch["top_logits"] = batch_logits.topk(20).values
        weight = objective.weights(batch_losses.detach(), batch)
        assert not weight.requires_grad
        part = (weight * batch_losses).sum() * len(ranks) / denominator
        loss, gradient = loss + part.detach() / len(ranks), gradient + gradients(part, theta) / len(ranks)
    return loss, gradient


def definition(name, rows, theta, theta0):
    """The objective by its definition: a loop over sequences and tokens, and one division."""
    current, pretrained, entropies = [], [], []
    for row in rows:
        batch = collate([[row]], theta0)
        logits = logits_of(theta, batch)[0]
        kept = batch["labels"][0] != IGNORE_INDEX
        current.append(token_losses(logits.unsqueeze(0), batch["labels"])[0][kept])
        pretrained.append(batch["pretrained_token_loss"][0][kept])
        top = numpy.exp(numpy.sort(logits[kept].detach().numpy())[:, -20:])
        top = top / top.sum(1, keepdims=True)
        entropies.append(torch.tensor(-(top * numpy.log(top)).sum(1) / 3.0))
    now, before = (
        numpy.median([float(losses.detach().mean()) for losses in sequences if len(losses)])
        for sequences in (current, pretrained)
    )
    total, number = 0, 0
    for losses, pretrained_losses, entropy in zip(current, pretrained, entropies, strict=True):
        for token, loss in enumerate(losses):
            p = math.exp(-loss.item())
            factor = {
                "CrossEntropy": 1.0,
                "FLOW": math.exp(-float(pretrained_losses.mean()) / before),
                "DFT": p,
                "TALR": max(p ** (1 / now), 0.01),
                "TALR_constant": max(p ** (1 / 0.7), 0.2),
                "STM": float(math.exp(float(pretrained_losses[token])) <= 2.5),
                "EAFT": float(entropy[token]),
            }[name]
            total, number = total + factor * loss, number + (factor if name == "STM" else 1)
    loss = total / number
    return loss.detach(), gradients(loss, theta)


@pytest.fixture(scope="module")
def setting():
    """Parameters, the pretrained ones near them, and twelve samples: nine of unequal length, three without any target."""
    theta = parameters(0)
    noise = parameters(1)
    theta0 = {name: (theta[name] + 0.4 * noise[name]).detach() for name in theta}
    with torch.no_grad():
        # Some tokens are nearly known, so that thresholds have something on both sides.
        for parameter in (theta["head"], theta0["head"]):
            parameter[:6] += 4 * theta["embedding"][:6].tanh()
    return theta, theta0, samples([4, 8, 6, 2, 11, 5, 9, 3, 7, 3, 5, 4], without=3)


def deal(rows, ranks, micro_batches, theta0):
    """Another order of the samples for each layout; one micro-batch is always the one without targets."""
    order = torch.randperm(9, generator=torch.Generator().manual_seed(ranks)).tolist()
    groups = [order[:2], order[2:6], order[6:]]  # unequal in rows as well
    groups.insert(ranks % 4, [9, 10, 11])
    batches = [collate([[rows[number]] for number in group], theta0) for group in groups]
    return [batches[rank * micro_batches : (rank + 1) * micro_batches] for rank in range(ranks)]


@pytest.mark.parametrize("layout", [(1, 4), (2, 2), (4, 1), "packed"], ids=str)
@pytest.mark.parametrize("name", all_objectives())
def test_objective_equals_its_definition_on_every_layout(setting, name, layout):
    """Loss and gradient equal to 1e-12, the gradient in relative L2 norm."""
    theta, theta0, rows = setting
    if layout == "packed":
        packs = [[rows[i] for i in pack] for pack in ([0, 9, 1, 2], [4], [3, 5, 6, 7, 8, 10])]
        ranks = [[collate(packs[:2], theta0, packed=True), collate(packs[2:], theta0, packed=True)]]
    else:
        ranks = deal(rows, *layout, theta0)
    loss, gradient = train_step(all_objectives()[name], ranks, theta, theta0)
    expected, expected_gradient = definition(name, rows, theta, theta0)
    assert loss == pytest.approx(float(expected), rel=1e-12, abs=0)
    assert (gradient - expected_gradient).norm() <= 1e-12 * expected_gradient.norm()
    assert expected_gradient.norm() > 0


@pytest.mark.parametrize(
    ("labels", "input_pos", "losses", "expected"),
    [
        # The first two tokens' targets belong to sequence A, the third's to B, which starts after it.
        ([[1, 1, 1, 1, -100]], [[0, 1, 2, 0, 1]], [[1.0, 2.0, 30.0, 50.0, 0.0]], [1.5, 40.0]),
        # A sequence split across rows counts as two.
        ([[1] * 4] * 2, [[0, 1, 2, 3], [4, 5, 6, 0]], [[1.0, 1, 1, 1], [2.0, 2, 8, 8]], [1.0, 2.0, 8.0]),
    ],
)
def test_sequence_losses_of_packed_rows(labels, input_pos, losses, expected):
    batch = {"labels": torch.tensor(labels), "input_pos": torch.tensor(input_pos)}
    assert FLOW().sequence_losses(torch.tensor(losses), batch).tolist() == expected


def test_sequence_losses_omit_sequences_without_targets(setting):
    _, theta0, rows = setting
    batch = collate([[row] for row in rows], theta0)
    pretrained, ignored = batch["pretrained_token_loss"], batch["labels"] == IGNORE_INDEX
    losses = FLOW().sequence_losses(pretrained, batch)
    assert len(losses) == 9
    assert torch.equal(FLOW().sequence_losses(pretrained.masked_fill(ignored, 9.0), batch), losses)
    pretrained[0, ~ignored[0]] = math.nan  # a diverged model must be visible
    assert FLOW().sequence_losses(pretrained, batch).isnan().tolist() == [True] + [False] * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_talr_is_finite_for_any_statistic(dtype):
    losses = torch.tensor([[0.0, 0.5, 3.0]], dtype=dtype)
    batch = {"labels": torch.ones(1, 3)}
    for tau, expected in [(0.0, [1, 0.01, 0.01]), (math.nan, [1, 1, 1]), (math.inf, [1, 1, 1])]:
        weights = TALR("exact").weights(losses, {**batch, "statistic": torch.tensor(tau)})
        torch.testing.assert_close(weights, torch.tensor([expected], dtype=dtype))


def test_stm_counts_the_tokens_kept():
    limit = math.log(2.5)
    batch = {
        "labels": torch.tensor([[4, 4, 4, -100, 4]]),
        "pretrained_token_loss": torch.tensor([[0.0, limit - 1e-6, limit + 1e-6, 0.0, math.nan]]),
    }
    token_loss = torch.tensor([[3.0, 5.0, 7.0, 0.0, 9.0]])
    assert STM().weights(token_loss, batch).tolist() == [[1, 1, 0, 0, 0]]
    assert STM().count(batch) == 2
    assert STM(threshold=math.inf).count(batch) == 3


@pytest.mark.parametrize("name", [*all_objectives(), "STM masks all"])
def test_micro_batch_without_targets_keeps_its_graph(setting, name):
    theta, theta0, rows = setting
    batch = collate([[row] for row in (rows[:3] if name == "STM masks all" else rows[9:])], theta0)
    if name == "STM masks all":
        batch["pretrained_token_loss"] += 5
    objective = FLOW(1.0) if name == "FLOW" else all_objectives()[name.split()[0]]
    logits = logits_of(theta, batch)
    # No sequence had a target.
    batch |= {"statistic": median(torch.empty(0)), "top_logits": logits.topk(20).values}
    token_loss = token_losses(logits, batch["labels"])
    loss = (objective.weights(token_loss.detach(), batch) * token_loss).sum()
    assert objective.count(batch) == loss.item() == 0
    assert not gradients(loss, theta).any()


def test_eaft_weights_are_the_normalized_entropy():
    logits = torch.full((1, 3, 20), -torch.inf)
    logits[0, 0] = 1.7  # all alike: the most unsure
    logits[0, 1, 4] = 3.0  # one alone
    logits[0, 2, :2] = torch.tensor([0.0, math.log(3)])  # a quarter, three quarters
    weights = EAFT().weights(torch.zeros(1, 3), {"labels": torch.zeros(1, 3), "top_logits": logits})
    torch.testing.assert_close(weights, torch.tensor([[math.log(20), 0.0, 0.5623351446188083]]) / 3.0)
    with pytest.raises(ValueError, match=r"top_logits'\] of shape \[1, 3, 19\] must hold the 20"):
        EAFT().weights(torch.zeros(1, 3), {"labels": torch.zeros(1, 3), "top_logits": logits[..., :19]})


def test_weights_are_at_least_fp32():
    losses = torch.tensor([[0.1, 2.3]], dtype=torch.bfloat16)
    batch = {
        "labels": torch.ones(1, 2, dtype=torch.long),
        "statistic": torch.tensor(0.9, dtype=torch.float64),
        "pretrained_token_loss": losses,
        "top_logits": torch.randn(1, 2, 20).bfloat16(),
    }
    for objective in (CrossEntropy(), FLOW(tau=1.0), DFT(), TALR(), STM(), EAFT()):
        assert objective.weights(losses, batch).dtype == torch.float32
        assert objective.weights(losses.double(), batch).dtype == torch.float64


@pytest.mark.parametrize("values", [[3.0], [4.0, 1.0], [2.0, 9.0, 1.0], [5.0, 5.0, 5.0, 1.0]])
def test_median_equals_numpy(values):
    assert float(median(torch.tensor(values))) == numpy.median(values)
    assert float(median(torch.tensor([math.nan, *values, math.nan]))) == numpy.median(values)
    assert median(torch.full((3,), math.nan)).isnan()


def test_objectives_declare_what_they_need():
    needs = {"FLOW": "pretrained_token_loss", "STM": "pretrained_token_loss", "EAFT": "top_logits"}
    declared = {name: objective.needs for name, objective in all_objectives().items() if objective.needs}
    assert {name: set(keys) for name, keys in declared.items()} == {name: {key} for name, key in needs.items()}
    assert (TALR("exact").statistic, TALR().statistic, TALR(2.0).statistic) == ("exact", "auto", None)
    for name, key in {**needs, "TALR": "statistic"}.items():
        objective = FLOW(1.0) if name == "FLOW" else all_objectives()[name]
        with pytest.raises(ValueError, match=rf"batch\['{key}'\] is missing: {name} needs it"):
            objective.weights(torch.ones(1, 2), {"labels": torch.ones(1, 2)})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TALR(tau="exakt"), "tau='exakt' must be 'auto', 'exact', 'lagged' or a number"),
        (lambda: TALR(tau=math.inf), "tau=inf must be finite and above 0"),
        (lambda: TALR(tau=None), "tau=None must be finite and above 0"),
        (lambda: TALR(w_min=1.5), r"w_min=1.5 must lie in \[0, 1\]"),
        (lambda: TALR(w_min=math.nan), r"w_min=nan must lie in \[0, 1\]"),
        (lambda: FLOW(tau=-1.0), "tau=-1.0 must be finite and above 0: the pretrained model's median"),
        (lambda: setattr(FLOW(), "tau", torch.tensor(math.nan)), "tau=nan must be finite and above 0"),
        (lambda: FLOW().weights(torch.ones(1, 1), {}), "tau=None: set it to the pretrained model's median"),
        (lambda: STM(threshold=0.9), "threshold=0.9 must be above 1: it is a perplexity"),
    ],
)
def test_objectives_reject_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# Loss and gradient of the output layer from trl 1.16.0 (transformers 5.23.0, torch 2.13.0, fp32): SFTTrainer.compute_loss
# with loss_type="dft" on a LlamaForCausalLM of hidden size 4 and vocabulary 7 without layers, whose weights are the
# formulas below; one batch of two rows, labels not yet shifted as there.
TRL_TOKENS = [[1, 4, 6, 3, 5, 2], [1, 3, 3, 6, 2, 0]]
TRL_LABELS = [[-100, -100, 6, 3, 5, 2], [-100, 3, 3, -100, 2, -100]]
TRL_DFT_LOSS = 0.1608874499797821
TRL_SFT_LOSS = 4.427120685577393
TRL_DFT_GRADIENT = [
    [0.0068526, 0.0314196, 0.0099569, -0.0260927],
    [0.005926, -0.0511422, -0.033287, 0.0333338],
    [-0.0002841, -0.0639884, -0.0339495, 0.0458254],
    [-0.0050246, 0.0447739, 0.0289786, -0.0292705],
    [-0.0066493, 0.0275098, 0.0213669, -0.0160785],
    [0.0000812, 0.0085544, 0.0044954, -0.0061494],
    [-0.0009017, 0.0028728, 0.0024387, -0.0015681],
]


def test_dft_equals_trl():
    embedding = torch.arange(28.0).mul(1.3).sin().view(7, 4)
    head = torch.arange(28.0).mul(0.7).cos().mul(2).view(7, 4).requires_grad_()
    labels = F.pad(torch.tensor(TRL_LABELS)[:, 1:], (0, 1), value=IGNORE_INDEX)
    hidden = F.rms_norm(embedding[torch.tensor(TRL_TOKENS)], (4,), eps=1e-6)
    token_loss = token_losses(hidden @ head.T, labels)
    losses = {}
    for objective in (CrossEntropy(), DFT()):
        weight = objective.weights(token_loss.detach(), {"labels": labels})
        losses[type(objective)] = (weight * token_loss).sum() / objective.count({"labels": labels})
    assert losses[CrossEntropy].item() == pytest.approx(TRL_SFT_LOSS, rel=1e-6)
    assert losses[DFT].item() == pytest.approx(TRL_DFT_LOSS, rel=1e-6)
    gradient = torch.autograd.grad(losses[DFT], head)[0]
    torch.testing.assert_close(gradient, torch.tensor(TRL_DFT_GRADIENT), rtol=0, atol=1e-7)
