"""What the rows of the textbook are made of: the row, the chapter's example, and the setting of the rest."""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from costmodel import formulas
from costmodel.levels import ETA
from costmodel.prediction import predict
from costmodel.profiles import GPU
from costmodel.profiles import gpu as gpu_profile
from npinfer import Ledger, ModelConfig, Precision, Transformer, generate, preset
from npinfer.errors import InputError
from npinfer.generate import no_tokens

FP16 = Precision()
N_PROMPT, N_OUTPUT = 1000, 100  # the chapter's request
LEAST_ETA = 1e-100  # times at a smaller one may be beyond the largest float


class Row(NamedTuple):
    """One claim of the chapter.

    Attributes
    ----------
    section : str
    quantity : str
    text : int, float, str or None
        What the chapter says: a number with the digits that it prints, in
        `unit`; a claim without a number as a string; None where it says nothing.
    formula : int, float or None
        What the chapter's formula gives, from its own rounded intermediates where it has some.
    exact : int, float or None
        What exact counting gives; None where it is undefined, or a rate is missing.
    unit : str
        Of all three; "" for a plain ratio.
    note : str
        Why formula and exact differ, or what follows.
    """

    section: str
    quantity: str
    text: int | float | str | None
    formula: int | float | None
    exact: int | float | None
    unit: str
    note: str


def row(quantity, unit, text, formula, exact, note=""):
    """A `Row` whose section is not yet known."""
    return Row("", quantity, text, formula, exact, unit, note)


class Setting(NamedTuple):
    """Model, GPU and efficiency of the rows that do not quote the chapter; make one with `of`."""

    config: ModelConfig
    gpu: GPU
    eta: float

    @classmethod
    def of(cls, model="mistral-7b", gpu="rtx-4090", eta=ETA):
        """A setting from the names of a model and a GPU, or from a config and a profile.

        Raises
        ------
        InputError
            If `eta` is not in (0, 1], or below `LEAST_ETA`.
        UnknownName
            If there is no such model or GPU.
        """
        formulas.effective_flops_per_s(1.0, eta)  # refuses what is no efficiency
        if eta < LEAST_ETA:
            raise InputError(f"efficiency is {eta}, expected {LEAST_ETA} at least, so that times are finite")
        return cls(model if isinstance(model, ModelConfig) else preset(model), gpu_profile(gpu), eta)

    @property
    def peak(self):
        """Matmul FLOPs per second in fp16, or None."""
        return self.gpu.matmul_flops_per_s.get("fp16")

    @property
    def weights_s(self):
        """Seconds of one pass over the weights: the chapter's TPOT_min."""
        weights = formulas.weight_bytes(self.config, FP16, streamed=True)
        return formulas.tpot_floor_s(weights, self.gpu.memory_bytes_per_s)

    def flops_s(self, flops, eta=1.0):
        """Seconds of so many FLOPs at eta * peak; None without a rate."""
        return None if self.peak is None else flops / formulas.effective_flops_per_s(self.peak, eta)

    def rough_prefill_s(self, n_prompt, eta=1.0):
        """Seconds of the chapter's 2*B*L*P FLOPs."""
        return self.flops_s(formulas.prefill_flops_rough(1, n_prompt, formulas.n_token_parameters(self.config)), eta)

    def floor(self, n_prompt=N_PROMPT, n_output=N_OUTPUT, n_cached=0, precision=FP16):
        """`Level` of the floor of a request."""
        return self.predict(n_prompt, n_output, n_cached, precision).floor

    def predict(self, n_prompt=N_PROMPT, n_output=N_OUTPUT, n_cached=0, precision=FP16):
        return predict(self.config, precision, self.gpu, n_prompt, n_output, n_cached=n_cached)


@lru_cache(maxsize=1)
def example():
    """The chapter's own setting, whatever the user's: Mistral-7B on an RTX 4090."""
    return Setting.of()


def shape_only(config):
    """A model without data; a table of learned positions is made long enough for the chapter's request."""
    if config.learned_positions:
        config = replace(config, max_context=max(config.max_context, N_PROMPT + N_OUTPUT))
    return Transformer.shape_only(config)


@lru_cache(maxsize=8)
def run_of(config):
    """The ledger of a shape-only run of the chapter's request."""
    with Ledger() as ledger:
        generate(shape_only(config), no_tokens((1, N_PROMPT)), N_OUTPUT)
    return ledger


def aside(config, experts="", latent=""):
    """What a note adds for a model that has experts, or latents."""
    return (experts if config.experts else "") + (latent if config.latent else "")


def over(a, b):
    """a / b, or None if one is unknown."""
    return None if a is None or b is None else a / b


def milliseconds(seconds):
    return None if seconds is None else 1e3 * seconds
