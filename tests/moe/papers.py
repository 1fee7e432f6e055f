"""The papers' routers and layer, transcribed token by token in float64; nothing here is shared with the package.

Each router takes one group of logits [L, X], the mask of real tokens, and a capacity. `order` is the order in which
tokens queue up; without it they queue up as they come.
"""

import math
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Answer:
    """One group's assignments: every token's choices, those with room at their expert, and the paper's losses."""

    choices: list[list[int]]
    placed: list[dict[int, tuple[int, float]]] = field(default_factory=list)  # per token, expert: (slot, gate)
    losses: dict[str, float] = field(default_factory=dict)


def softmax(row):
    shifted = [np.exp(float(v) - float(max(row))) for v in row]
    total = sum(shifted)
    return [v / total for v in shifted]


def best(row, excluded=()):
    """Return the index of the largest entry, the first of equals."""
    found = None
    for index, value in enumerate(row):
        if index not in excluded and (found is None or value > row[found]):
            found = index
    return found


def top(row, count):
    """Return the indices of the largest entries, largest first; equals in their order."""
    found = []
    for _ in range(count):
        found.append(best(row, found))
    return found


def log_odds_against(row, pick):
    """Return log((1 - p) / p) of one entry's probability p, which distinguishes probabilities near 1."""
    if row[pick] == -math.inf:
        return math.inf
    ahead = sorted(float(v) - float(row[pick]) for index, v in enumerate(row) if index != pick)
    if not ahead or ahead[-1] == -math.inf:
        return -math.inf
    return ahead[-1] + math.log(math.fsum(math.exp(v - ahead[-1]) for v in ahead))


def surest_first(logits):
    """V-MoE, arXiv 2106.05974, batch-prioritized routing: tokens by their largest probability, equals in order."""
    return sorted(range(len(logits)), key=lambda token: (log_odds_against(logits[token], best(logits[token])), token))


def switch(logits, real, capacity, alpha, order=None):
    """Switch Transformer, arXiv 2101.03961, equations 1 to 6."""
    answer = Answer([[best(row)] for row in logits], [{} for _ in logits])
    _first_come(answer, [[softmax(row)[best(row)]] for row in logits], real, capacity, order)
    answer.losses["aux"] = alpha * balance(logits, real, answer.choices, 1)
    return answer


def gshard(logits, real, random=None, capacity=1, order=None):
    """GShard, arXiv 2006.16668, Algorithm 1; the loss is its l_aux, line 13."""
    experts, tokens = len(logits[0]), sum(bool(r) for r in real)
    answer, count, mean = Answer([top(row, 2) for row in logits], [{} for _ in logits]), [0] * experts, [0.0] * experts
    for token in order or range(len(logits)):  # lines 4 to 12
        if not real[token]:
            continue
        gates, (e1, e2) = softmax(logits[token]), answer.choices[token]
        for expert in range(experts):
            mean[expert] += gates[expert] / tokens
        if count[e1] < capacity:
            answer.placed[token][e1] = (count[e1], gates[e1] / (gates[e1] + gates[e2]))
        count[e1] += 1
    if tokens:  # line 13, before any second choice is counted
        answer.losses["aux"] = sum(count[e] / tokens * mean[e] for e in range(experts)) / experts
    for token in order or range(len(logits)):  # lines 14 to 23
        if not real[token]:
            continue
        gates, (e1, e2) = softmax(logits[token]), answer.choices[token]
        g2 = gates[e2] / (gates[e1] + gates[e2])
        if count[e2] < capacity and (random is None or 2 * g2 > random[token]):
            answer.placed[token][e2] = (count[e2], g2)
        count[e2] += 1
    return answer


def st_moe(logits, real, capacity, alpha, order=None):
    """ST-MoE, arXiv 2202.08906: top-2 without GShard's draw, the balance of first choices."""
    answer, gates = Answer([top(row, 2) for row in logits], [{} for _ in logits]), []
    for row, (e1, e2) in zip(logits, answer.choices):
        p = softmax(row)
        gates.append([p[e1] / (p[e1] + p[e2]), p[e2] / (p[e1] + p[e2])])
    _first_come(answer, gates, real, capacity, order)
    answer.losses["aux"] = alpha * balance(logits, real, answer.choices, 1)
    return answer


def top_k(logits, logs, real, capacity, config, bias=None, order=None):
    """Mixtral, arXiv 2401.04088, section 2.1: softmax of the k best logits; or the probabilities of all of them.

    With sigmoid scores, groups or a bias, DeepSeek-V3, arXiv 2412.19437, equations 12 to 16; for groups by their best
    expert, DeepSeek-V2, arXiv 2405.04434, section 2.2.2. `logs` are the logarithms of sigmoid scores, or the logits.
    """
    answer, gates = Answer([], [{} for _ in logits]), []
    for row, log_row in zip(logits, logs):
        scores = [math.exp(v) for v in log_row] if config.scores == "sigmoid" else softmax(row)
        values = list(row) if bias is None else [s + float(b) for s, b in zip(scores, bias)]  # logits rank as scores
        size = config.experts // config.expert_groups
        groups = [range(at, at + size) for at in range(0, config.experts, size)]
        of_groups = [sum(values[e] for e in [group[i] for i in top([values[e] for e in group], config.group_best)])
                     for group in groups]  # fmt: skip
        kept = {e for at in top(of_groups, config.chosen_groups) for e in groups[at]}
        picks = []
        for _ in range(config.choices):
            picks.append(best(values, [e for e in range(config.experts) if e in picks or e not in kept]))
        gate = softmax([log_row[e] for e in picks]) if config.renormalize else [scores[e] for e in picks]
        answer.choices.append(picks)
        gates.append([config.gate_factor * g for g in gate])
    _first_come(answer, gates, real, capacity, order)
    answer.losses["aux"] = config.aux_weight * balance(logs, real, answer.choices, config.choices)
    return answer


def log_sigmoid(value):
    """log(1 / (1 + exp(-value)))"""
    return min(value, 0.0) - math.log1p(math.exp(-abs(value)))


def noisy_top_k(logits, raw, real, capacity, k, noise=None, priority=False):
    """Shazeer et al., arXiv 1701.06538, equations 3 to 11; both losses without their weights."""
    experts, widths = len(logits[0]), [[math.log1p(math.exp(float(v))) for v in row] for row in raw]
    noisy = [[float(c) + (noise[t][e] * widths[t][e] if noise is not None else 0.0) for e, c in enumerate(row)]
             for t, row in enumerate(logits)]  # fmt: skip
    answer, gates = Answer([top(row, k) for row in noisy], [{} for _ in logits]), []
    importance, load = [0.0] * experts, [0.0] * experts
    for token, (row, picks) in enumerate(zip(noisy, answer.choices)):
        gates.append(softmax([row[e] for e in picks]))
        if not real[token]:
            continue
        for expert, gate in zip(picks, gates[-1]):
            importance[expert] += gate
        for expert in range(experts):
            if noise is None or k == experts:
                load[expert] += expert in picks
                continue
            others = [v for e, v in enumerate(row) if e != expert]
            kth = sorted(others, reverse=True)[k - 1]
            ahead = (float(logits[token][expert]) - kth) / widths[token][expert]
            load[expert] += 0.5 * math.erfc(-ahead / math.sqrt(2))
    _first_come(answer, gates, real, capacity, surest_first(noisy) if priority else None)
    answer.losses = {"importance": variation(importance), "load": variation(load)}
    return answer


def expert_choice(logits, real, capacity):
    """Expert choice, arXiv 2202.09368, equations 1 and 2: every expert takes its best tokens."""
    experts = len(logits[0])
    answer = Answer([list(range(experts)) for _ in logits], [{} for _ in logits])
    for expert in range(experts):
        tokens = [token for token in range(len(logits)) if real[token]]
        tokens.sort(key=lambda token: (log_odds_against(logits[token], expert), token))
        for rank, token in enumerate(tokens[:capacity]):
            answer.placed[token][expert] = (rank, softmax(logits[token])[expert])
    return answer


def balance(logits, real, choices, k):
    """X · Σ f_i · P_i of the first k choices (Switch, equations 4 to 6; for more than one, DeepSeekMoE, 12 to 14)."""
    experts, tokens = len(logits[0]), sum(bool(r) for r in real)
    share, mean = [0.0] * experts, [0.0] * experts
    for row, picks, is_real in zip(logits, choices, real):
        if is_real:
            for expert, probability in enumerate(softmax(row)):
                mean[expert] += probability / tokens
            for expert in picks[:k]:
                share[expert] += 1 / (k * tokens)
    return experts * sum(f * p for f, p in zip(share, mean))


def z(logits, real):
    """ST-MoE, equation 5: the mean square of the log of the softmax's denominator."""
    squares = []
    for row, is_real in zip(logits, real):
        if is_real:
            largest = float(max(row))
            squares.append((largest + math.log(sum(math.exp(float(v) - largest) for v in row))) ** 2)
    return sum(squares) / len(squares) if squares else 0.0


def variation(values):
    """Return the square of the coefficient of variation."""
    mean = sum(values) / len(values)
    return sum((v - mean) ** 2 for v in values) / len(values) / mean**2 if mean else 0.0


def _first_come(answer, gates, real, capacity, order):
    """Assign first choices and then second ones, tokens in their order, while there is room."""
    count = {}
    for choice in range(len(answer.choices[0])):
        for token in order or range(len(gates)):
            if not real[token]:
                continue
            expert = answer.choices[token][choice]
            slot = count.get(expert, 0)
            if slot < capacity:
                answer.placed[token][expert] = (slot, gates[token][choice])
            count[expert] = slot + 1


def routed(config, logits, real, random=None, bias=None):
    """Return the answer of the config's router for one group, with weighted losses.

    Args:
        config: a MoEConfig.
        logits: [L, X]; for noisy-top-k [L, X] or [L, 2X].
        real: [L].
        random: the random numbers that the router drew: [L] for gshard, [L, X] for noisy-top-k; None in evaluation.
        bias: [X], the bias of the choice of top-k; None for none.
    """
    experts, capacity = config.experts, config.capacity(len(logits))
    clean, raw = logits[:, :experts], logits[:, experts:]
    logs = np.maximum(clean, -1e15)  # a bias may choose experts of -inf
    logs = [[log_sigmoid(float(v)) for v in row] for row in logs] if config.scores == "sigmoid" else logs
    order = surest_first(logs) if config.priority else None
    if config.router == "switch":
        answer = switch(clean, real, capacity, config.aux_weight, order)
    elif config.router == "gshard":
        answer = gshard(clean, real, random, capacity, order)
        answer.losses["aux"] = config.aux_weight * experts**2 * answer.losses.get("aux", 0.0)
    elif config.router == "st-moe":
        answer = st_moe(clean, real, capacity, config.aux_weight, order)
    elif config.router == "top-k":
        answer = top_k(clean, logs, real, capacity, config, bias, order)
    elif config.router == "noisy-top-k":
        raw = raw if raw.shape[-1] else np.zeros_like(clean)
        answer = noisy_top_k(clean, raw, real, capacity, config.choices, random, config.priority)
        answer.losses["importance"] *= config.importance_weight
        answer.losses["load"] *= config.load_weight
    elif config.router == "expert-choice":
        answer = expert_choice(clean, real, capacity)
    if config.z_coefficient:
        answer.losses["z"] = config.z_coefficient * z(clean, real)
    return answer


def layer(x, answer, expert_function):
    """Return the sum of gate · expert(x) over the experts that took each token of one group [L, E]."""
    rows = []
    for token, placed in enumerate(answer.placed):
        row = np.zeros_like(x[token], dtype=np.float64)
        for expert, (_, gate) in placed.items():
            row = row + gate * expert_function(expert, x[token])
        rows.append(row)
    return np.stack(rows)
