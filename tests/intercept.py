"""Putting something else in the place of an operation, wherever a model finds it.

Some operations the layers look up in their modules; those with settings, each
layer holds by itself.
"""

from dataclasses import fields, is_dataclass

from npinfer import ops, products


def replace_operation(patch, model, name, make):
    """Put `make(operation)` in the place of every operation of this name that a model uses.

    Parameters
    ----------
    patch : pytest.MonkeyPatch
    model : Transformer
    name : str
        Of the operation's body.
    make : callable
        Gives the replacement of an operation.
    """
    places = list(_held(model.weights, name))
    places += [(vars(module), name) for module in (ops, products) if hasattr(module, name)]
    assert places, f"the model has no operation {name}"
    for namespace, key in places:
        patch.setitem(namespace, key, make(namespace[key]))


def _held(part, name):
    """Yield (attributes, key) of each operation of this name in a part of the weights."""
    if isinstance(part, tuple):
        for each in part:
            yield from _held(each, name)
    elif is_dataclass(part):
        for field in fields(part):
            value = getattr(part, field.name)
            if _name_of(value) == name:
                yield vars(part), field.name
            else:
                yield from _held(value, name)


def _name_of(value):
    operation = getattr(value, "func", value)  # a norm has its gain given
    body = getattr(operation, "__wrapped__", None)
    return getattr(getattr(body, "func", body), "__name__", None)  # and settings a body
