"""A tiny model that reads images: a vision tower, a projector and a tiny language model."""

from pathlib import Path

import msgspec

from shared.contracts.models import ModelTask
from shared.models.tiny_tokenizer import IMAGE_ID, IMAGE_TOKENS, VOCAB_SIZE
from shared.models.tiny_weights import TinyArchitecture, save_random_weights, size_of

Shape = tuple[int, ...]


class TinyImageArchitecture(msgspec.Struct, frozen=True, kw_only=True):
    """
    An Idefics3 model, which divides an image into tiles and each tile into patches; tokens of the
    prompt have the embeddings of patches.

    vLLM imports this architecture without torchvision, which most others need.
    """

    seed: int
    max_edge: int = 64
    """Length to which the longer edge of an image is scaled, in pixels."""
    tile_size: int = 32
    """Width and height of a tile, in pixels."""
    patch_size: int = 8
    """Width and height of a patch, in pixels."""
    scale_factor: int = 2
    """One token stands for a square of patches with this width and height."""
    hidden_size: int = 32
    intermediate_size: int = 64
    num_layers: int = 2
    num_heads: int = 2
    architecture: str = "Idefics3ForConditionalGeneration"
    task: ModelTask = "generate"

    @property
    def text(self) -> TinyArchitecture:
        """The language model."""
        return TinyArchitecture(
            architecture="LlamaForCausalLM",
            model_type="llama",
            seed=self.seed,
            vocab_size=VOCAB_SIZE + len(IMAGE_TOKENS),
        )

    @property
    def patches_per_tile(self) -> int:
        return (self.tile_size // self.patch_size) ** 2

    def config(self) -> dict[str, object]:
        """Content of the model's `config.json`."""
        text = self.text.config()
        return {
            "architectures": [self.architecture],
            "model_type": "idefics3",
            "image_token_id": IMAGE_ID,
            "scale_factor": self.scale_factor,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "bos_token_id": text["bos_token_id"],
            "eos_token_id": text["eos_token_id"],
            "text_config": text,
            "vision_config": {
                "model_type": "idefics3_vision",
                "hidden_size": self.hidden_size,
                "intermediate_size": self.intermediate_size,
                "num_hidden_layers": self.num_layers,
                "num_attention_heads": self.num_heads,
                "image_size": self.tile_size,
                "patch_size": self.patch_size,
                "hidden_act": "gelu_pytorch_tanh",
            },
        }

    def processor_files(self) -> dict[str, dict[str, object]]:
        """Name of a file of the image processor -> its content."""
        return {
            "preprocessor_config.json": {
                "image_processor_type": "Idefics3ImageProcessor",
                "processor_class": "Idefics3Processor",
                "size": {"longest_edge": self.max_edge},
                "max_image_size": {"longest_edge": self.tile_size},
                "do_convert_rgb": True,
                "do_resize": True,
                "do_image_splitting": True,
                "do_rescale": True,
                "do_normalize": True,
                "do_pad": True,
                "rescale_factor": 1 / 255,
                "image_mean": [0.5, 0.5, 0.5],
                "image_std": [0.5, 0.5, 0.5],
                "resample": 1,
            },
            "processor_config.json": {
                "processor_class": "Idefics3Processor",
                "image_seq_len": self.patches_per_tile // self.scale_factor**2,
            },
        }

    def shapes(self) -> dict[str, Shape]:
        """Weight name in the checkpoint -> shape of the weight."""
        shapes = {
            name.replace("model.", "model.text_model.", 1): shape
            for name, shape in self.text.shapes().items()
        }
        tower, width = "model.vision_model", self.hidden_size
        patch = (width, 3, self.patch_size, self.patch_size)
        shapes |= {
            f"{tower}.embeddings.patch_embedding.weight": patch,
            f"{tower}.embeddings.patch_embedding.bias": (width,),
            f"{tower}.embeddings.position_embedding.weight": (self.patches_per_tile, width),
            **_norm(f"{tower}.post_layernorm", width),
        }
        for layer in range(self.num_layers):
            prefix = f"{tower}.encoder.layers.{layer}"
            for name in ("q", "k", "v", "out"):
                shapes |= _linear(f"{prefix}.self_attn.{name}_proj", width, width)
            shapes |= _linear(f"{prefix}.mlp.fc1", self.intermediate_size, width)
            shapes |= _linear(f"{prefix}.mlp.fc2", width, self.intermediate_size)
            shapes |= _norm(f"{prefix}.layer_norm1", width)
            shapes |= _norm(f"{prefix}.layer_norm2", width)
        projection = (self.text.hidden_size, width * self.scale_factor**2)
        return shapes | {"model.connector.modality_projection.proj.weight": projection}

    @property
    def weight_bytes(self) -> int:
        """Size of the model's weights in float32, in bytes."""
        return size_of(self.shapes())

    def save_weights(self, path: Path) -> None:
        """
        Write a safetensors file of deterministic random weights.

        Raises:
            ImportError: safetensors is not installed; it is installed with the engine.
        """
        save_random_weights(path, self.shapes(), self.seed)


def _linear(name: str, rows: int, columns: int) -> dict[str, Shape]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _norm(name: str, size: int) -> dict[str, Shape]:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}
