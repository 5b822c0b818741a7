"""Lines that explain a number each, and those of parameters and weight bytes."""

from functools import partial

from costmodel import experts, formulas
from costmodel.tensors import tensors
from costmodel.traced import NAMES, VALUES, Traced

COUNTED = "README, What is counted"


class Lines(list):
    """Explanations in the order in which they are read."""

    def add(self, name, number, unit, section, gpu=None):
        """Explain `number`, and return it as what later lines know by its name."""
        self.append(
            {
                "name": name,
                "gpu": gpu,
                "expression": number.text(NAMES),
                "values": number.text(VALUES),
                "value": number.value,
                "unit": unit,
                "section": section,
            }
        )
        return Traced.named(name, number.value)

    def add_each(self, name, numbers, kinds, unit, section):
        """Explain a number of each kind of layers, once if it is the same in all; those numbers by name."""
        if len({number.text() for number in numbers}) == 1:
            return [self.add(name, numbers[0], unit, section)] * len(numbers)
        return [self.add(name + kind.suffix, number, unit, section) for kind, number in zip(kinds, numbers)]


class Sparse:
    """Experts of a layer, their bytes explained.

    Attributes
    ----------
    experts : Experts
    nbytes, name : Traced
        Bytes of one expert: the expression, and its name.
    """

    def __init__(self, lines, kind, suffix):
        one, self.experts = _expert_bytes(kind), kind.config.experts
        self.nbytes, self._names, names = sum(one), {}, dict(zip(map(Traced.text, one), experts.PROJECTIONS))
        self._matrices = []
        for projection, nbytes in zip(experts.PROJECTIONS, one):
            text, what = nbytes.text(), "matrix" if len(names) == 1 else projection
            if text not in self._names:
                self._names[text] = lines.add(f"expert_{what}_bytes{suffix}", nbytes, "B", "4.1")
            self._matrices.append(self._names[text])
        self.name = lines.add(f"expert_bytes{suffix}", sum(self._matrices), "B", "4.1")

    def in_terms(self, number, times):
        """`number`, with the bytes of so many experts in it by name."""
        return number - times * self.nbytes + times * self.name

    def read(self, n_tokens):
        """Bytes that a forward over so many tokens is expected to read of a layer's experts."""
        share = experts.expected_share(self.experts, n_tokens)
        return sum([experts.read(self.experts, nbytes, share) for nbytes in self._matrices])


def _expert_bytes(kind):
    """Bytes of one expert of a layer of this kind, by projection."""
    return [layers[0].nbytes for layers in experts.one_expert(kind.config, kind.precision)]


def _sparse(lines, kinds):
    """`Sparse` of each kind of layers, None where there are no experts."""
    have = [kind for kind in kinds if kind.config.experts]
    if len({tuple([nbytes.text() for nbytes in _expert_bytes(kind)]) for kind in have}) == 1:
        same = Sparse(lines, have[0], "")
        return [same if kind in have else None for kind in kinds]
    return [Sparse(lines, kind, kind.suffix) if kind in have else None for kind in kinds]


def _by_part(lines, kinds, each):
    """Weight bytes of a layer of each kind, in terms of those of attention, of the MLP, and of all vectors."""
    for part in ("attention_matrix", "mlp_matrix", "vector"):
        expressions = [_part_bytes(kind, part) for kind in kinds]
        names = lines.add_each(f"layer_{part}_bytes", expressions, kinds, "B", "4.1")
        each = [one - expression + name for one, expression, name in zip(each, expressions, names)]
    return each


def _part_bytes(kind, part):
    """Stored bytes of the tensors of a part of a layer, those that each expert has left out."""
    of_layer = [each for each in tensors(kind.config).values() if each.layers == (0,) and each.n_copies == 1]
    return sum([each.total_bytes(kind.precision) for each in of_layer if _part(each) == part], Traced.of(0))


def _part(tensor):
    if len(tensor.shape) == 1:
        return "vector"
    in_mlp = tensor.name.endswith(("gate_proj", "up_proj", "down_proj", "router"))
    return "mlp_matrix" if in_mlp else "attention_matrix"


class Weights:
    """Parameters and weight bytes of a `TracedModel`, explained.

    Attributes
    ----------
    n_params : Traced
        Parameters that one token reads, by name.
    sparse : list of (Sparse or None)
        Experts of each kind of layers.
    streamed : Parts
        Expressions of the bytes that a step of one sequence reads.
    name : Traced
        Those of the model, by name.
    """

    def __init__(self, lines, model):
        self.n_params = _parameters(lines, model)
        self.sparse = _sparse(lines, model.kinds)
        resident = model.parts(formulas.weight_bytes)
        self.streamed = model.parts(partial(formulas.weight_bytes, streamed=True))
        fewer = self.streamed - resident
        for number, layers in enumerate(self.sparse):
            if layers:
                n_experts, n_active = layers.experts.n_experts, layers.experts.n_active
                resident.each[number] = layers.in_terms(resident.each[number], n_experts)
                fewer.each[number] = layers.in_terms(fewer.each[number], n_active - n_experts)
        each = _by_part(lines, model.kinds, resident.each)
        each = lines.add_each("layer_weight_bytes", each, model.kinds, "B", "4.1")
        name = lines.add("weight_bytes_resident", model.whole(resident._replace(each=each)), "B", "4.1")
        self.name = lines.add("weight_bytes_streamed", name + model.whole(fewer), "B", "4.1")


def _parameters(lines, model):
    """Explain parameters; those that one token reads, by name."""
    every, streamed, token = [
        model.parts(lambda config, precision, form=form: form(config))
        for form in (formulas.n_parameters, formulas.n_streamed_parameters, formulas.n_token_parameters)
    ]
    each = lines.add_each("layer_parameters", every.each, model.kinds, "", "4.1")
    name = lines.add("n_parameters", model.whole(every._replace(each=each)), "", "4.1")
    name = lines.add("n_streamed_parameters", name + model.whole(streamed - every), "", "4.1")
    return lines.add("n_token_parameters", name + model.whole(token - streamed), "", "9") if model.config.experts else name
