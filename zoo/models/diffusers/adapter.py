"""Interface of `zoo.convert` to diffusers models and pipelines, see `zoo.models.Backbone`."""

from diffusers import ModelMixin
from diffusers.configuration_utils import FrozenDict
from diffusers.models.attention_processor import Attention
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from torch import nn

from zoo.grid import Grid
from zoo.mixers import LayerSpec, MixerConfig
from zoo.models import Conversion, Swap
from zoo.models.diffusers.attention import DiffusionSite
from zoo.models.diffusers.families import FAMILIES, family_of, known_family
from zoo.models.diffusers.models import HLADiffusionModel, conversions_of
from zoo.models.saved_config import live_conversions
from zoo.models.unsupported import refuse_rotary

COMPUTE_TYPES = ("torch.float16", "torch.bfloat16", "torch.float32", "torch.float64")


class DiffusersBackbone:
    """Diffusers transformers, and pipelines with such transformers."""

    def submodels(self, model: ModelMixin | DiffusionPipeline) -> dict[str, nn.Module]:
        if isinstance(model, DiffusionPipeline):
            return self._parts_of_pipeline(model)
        if family_of(model) is None:
            raise _unknown_model(model)
        if getattr(model, "_parallel_config", None) is not None:
            raise ValueError(f"convert {type(model).__name__} before enable_parallelism, which splits its tokens")
        for name, attn in self.layers(model).items():
            if not isinstance(attn, DiffusionSite):
                self._site_class(model, name).check_processor(attn.processor)
        return {"": model}

    def _parts_of_pipeline(self, pipe: DiffusionPipeline) -> dict[str, nn.Module]:
        models = {n: m for n, m in pipe.components.items() if isinstance(m, ModelMixin)}
        known = {name: m for name, m in models.items() if family_of(m) is not None}
        if not known:
            denoiser = next((m for n, m in models.items() if n.startswith(("transformer", "unet"))), pipe)
            raise _unknown_model(denoiser)
        for m in known.values():
            self.submodels(m)
        return known

    def name(self, model: ModelMixin | DiffusionPipeline) -> str:
        return known_family(model).host.__name__ if family_of(model) else type(model).__name__

    def layers(self, model: ModelMixin) -> dict[str, nn.Module]:
        return dict(m for m in model.named_modules() if self._pattern(model, m[0]))

    def blocks(self, model: ModelMixin) -> dict[str, int]:
        numbers: dict[str, int] = {}
        for name in self.layers(model):
            numbers.setdefault(name.rpartition(".")[0], len(numbers))
        return {name: numbers[name.rpartition(".")[0]] for name in self.layers(model)}

    def current_mixer(self, model: ModelMixin, attn: nn.Module) -> str:
        return getattr(attn, "mixer_name", known_family(model).mixer)

    def grid_dims(self, model: ModelMixin) -> int:
        return known_family(model).grid_dims

    def layer_spec(self, model: ModelMixin, attn: Attention) -> LayerSpec:
        weight = attn.to_q.weight
        if str(weight.dtype) not in COMPUTE_TYPES:
            raise ValueError(
                f"the projections of {type(model).__name__} are stored as {weight.dtype}: convert the model before it "
                "is quantised or cast layer by layer"
            )
        dim, width = attn.to_q.in_features, attn.to_q.out_features
        kv_heads = attn.to_k.out_features * attn.heads // width
        return LayerSpec(
            dim,
            attn.heads,
            width // attn.heads,
            kv_heads,
            grid=self._usual_grid(model),
            device=weight.device,
            dtype=weight.dtype,
        )

    def check_options(self, model: ModelMixin, attn: Attention, config: MixerConfig) -> None:
        refuse_rotary(config.name, known_family(model).rotary)
        dims = self.grid_dims(model)
        if config.options.grid_dims != dims:
            raise ValueError(f"the tokens of {type(model).__name__} lie on a {dims}-D grid: set grid_dims={dims}")

    def skipped_layers(self, model: ModelMixin) -> dict[str, str]:
        pattern = known_family(model).skipped
        reason = "cross-attention: its cost is linear in the image tokens already"
        return {name: reason for name, _ in model.named_modules() if _matches_pattern(pattern, name)}

    def note(self, model: ModelMixin) -> str:
        return ""

    def install(self, model: ModelMixin, swaps: list[Swap], conversion: Conversion) -> None:
        names = {id(attn): name for name, attn in self.layers(model).items()}
        if not isinstance(model, HLADiffusionModel):
            self._to_converted_class(model)
        for attn, mixer in swaps:
            if not isinstance(attn, DiffusionSite):
                attn.__class__ = self._site_class(model, names[id(attn)])
            assert isinstance(attn, DiffusionSite)
            attn.install(mixer.train(attn.training))
        model.hla_config.append(conversion)

    def _to_converted_class(self, model: ModelMixin) -> None:
        model.__class__ = known_family(model).converted
        model.hla_config = []
        if model.is_gradient_checkpointing:
            model.enable_gradient_checkpointing(model._gradient_checkpointing_func)

    def revert(self, model: ModelMixin) -> None:
        if not isinstance(model, HLADiffusionModel):
            raise ValueError(f"{type(model).__name__} is not converted: there is nothing to revert")
        for site in [m for m in model.modules() if isinstance(m, DiffusionSite)]:
            site.uninstall()
        model.__class__ = known_family(model).host
        del model.hla_config
        model._internal_dict = FrozenDict({k: v for k, v in model.config.items() if k != "conversions"})
        if model.is_gradient_checkpointing:
            model.enable_gradient_checkpointing()

    def update_saved_config(self, model: ModelMixin | DiffusionPipeline) -> None:
        if isinstance(model, DiffusionPipeline):
            model.register_modules(**self._parts_of_pipeline(model))  # model_index.json names the new class
            return
        host = known_family(model).mixer
        live = live_conversions(self.layers(model), host if host == "softmax" else None)
        model.register_to_config(conversions=conversions_of(live))

    def _usual_grid(self, model: ModelMixin) -> Grid | None:
        """Return the token grid at the default size of the model, for the choice of blocks; None if unknown."""
        family, size = known_family(model), model.config.get("sample_size")
        return family.grid or ((size // model.config.patch_size,) * 2 if isinstance(size, int) else None)

    def _pattern(self, model: ModelMixin, name: str) -> str | None:
        """Return the pattern of `Family.sites` that matches a module name."""
        patterns = known_family(model).sites
        return next((p for p in patterns if _matches_pattern(p, name)), None)

    def _site_class(self, model: ModelMixin, name: str) -> type[DiffusionSite]:
        return known_family(model).sites[self._pattern(model, name) or ""]


def _matches_pattern(pattern: str, name: str) -> bool:
    """Whether `name` equals `pattern` with a number for each star."""
    if not name or pattern.count(".") != name.count("."):
        return False
    return all(x == y or (x == "*" and y.isdecimal()) for x, y in zip(pattern.split("."), name.split("."), strict=True))


def _unknown_model(model: nn.Module | DiffusionPipeline) -> ValueError:
    names = ", ".join(sorted(f.host.__name__ for f in FAMILIES))
    return ValueError(
        f"cannot convert {type(model).__name__}: it is not a known diffusion transformer. "
        f"Supported: {names}, and pipelines with one of them."
    )


DIFFUSERS = DiffusersBackbone()
