"""The papers' routers and layer, transcribed token by token in float64; nothing here is shared with the package."""

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Answer:
    """One group's assignments: every token's choices, those that found room, and the loss as the paper writes it."""

    choices: list[list[int]]
    placed: list[dict[int, tuple[int, float]]] = field(default_factory=list)  # per token, expert: (slot, gate)
    loss: float = 0.0


def softmax(row):
    shifted = [np.exp(float(v) - float(max(row))) for v in row]
    total = sum(shifted)
    return [v / total for v in shifted]


def best(row, excluded=None):
    """Index of the largest entry, the first of equals."""
    found = None
    for index, value in enumerate(row):
        if index != excluded and (found is None or value > row[found]):
            found = index
    return found


def switch(logits, real, capacity, alpha):
    """Switch Transformer, arXiv 2101.03961, equations 1 to 6, one group of logits [L, X]."""
    experts = len(logits[0])
    answer, queue, first, mean, tokens = Answer([]), [0] * experts, [0] * experts, [0.0] * experts, 0
    for token, row in enumerate(logits):
        probability, pick = softmax(row), best(row)
        answer.choices.append([pick])
        answer.placed.append({})
        if not real[token]:
            continue
        tokens += 1
        first[pick] += 1
        for expert in range(experts):
            mean[expert] += probability[expert]
        if queue[pick] < capacity:
            answer.placed[token][pick] = (queue[pick], probability[pick])
        queue[pick] += 1
    if tokens:
        answer.loss = alpha * experts * sum(first[e] / tokens * mean[e] / tokens for e in range(experts))
    return answer


def gshard(logits, real, random=None, capacity=1):
    """GShard, arXiv 2006.16668, Algorithm 1, one group of logits [S, E]; `loss` is its l_aux, line 13."""
    experts = len(logits[0])
    answer, count, mean = Answer([]), [0] * experts, [0.0] * experts
    tokens = sum(bool(r) for r in real)
    for token, row in enumerate(logits):  # lines 4 to 12
        gates, e1 = softmax(row), best(row)
        e2 = best(row, excluded=e1)
        answer.choices.append([e1, e2])
        answer.placed.append({})
        if not real[token]:
            continue
        for expert in range(experts):
            mean[expert] += gates[expert] / tokens
        if count[e1] < capacity:
            answer.placed[token][e1] = (count[e1], gates[e1] / (gates[e1] + gates[e2]))
        count[e1] += 1
    if tokens:  # line 13, before any second choice is counted
        answer.loss = sum(count[e] / tokens * mean[e] for e in range(experts)) / experts
    for token, row in enumerate(logits):  # lines 14 to 23
        if not real[token]:
            continue
        gates, (e1, e2) = softmax(row), answer.choices[token]
        g2 = gates[e2] / (gates[e1] + gates[e2])
        if count[e2] < capacity and (random is None or 2 * g2 > random[token]):
            answer.placed[token][e2] = (count[e2], g2)
        count[e2] += 1
    return answer


def layer(x, answer, expert_function):
    """Sum of gate · expert(x) over the experts that took each token of one group [L, E]."""
    rows = []
    for token, placed in enumerate(answer.placed):
        row = np.zeros_like(x[token], dtype=np.float64)
        for expert, (_, gate) in placed.items():
            row = row + gate * expert_function(expert, x[token])
        rows.append(row)
    return np.stack(rows)
