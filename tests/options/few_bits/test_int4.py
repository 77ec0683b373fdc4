"""INT4 against compressed-tensors' own compressor, whose format it is, and the straight-through gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megarl.options.few_bits.formats import INT4_WEIGHTS, int4
from megarl.options.few_bits.int4 import dequantise_rows, fake_quantised, packed, quantise_rows, unpacked


def rows_of(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random rows of magnitudes from 1e-6 to 100, with a group of zeros and one of a single value."""
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-6, 2, shape[0])[:, None]
    rows[0, :32] = 0
    rows[1, :32], rows[1, 3] = 0, -0.3
    return rows.to(dtype)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_librarys_compressor_packs_the_same_bytes_and_reads_the_same_values(group: int, dtype: torch.dtype) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor

    arguments = quantization.QuantizationArgs(**INT4_WEIGHTS, group_size=group)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=arguments)
    rows = rows_of((24, 256), dtype)
    numbers, scales = quantise_rows(rows, group)
    # its arithmetic is in the dtype that it is given; the same values in float32 are rounded once
    given = {"weight": rows.float(), "weight_scale": scales.float()}
    found = PackedQuantizationCompressor.compress(given, scheme)
    assert found["weight_shape"].tolist() == [24, 256]
    assert torch.equal(found["weight_packed"], packed(numbers))
    read = PackedQuantizationCompressor.decompress(found, scheme)
    assert torch.equal(read["weight"], dequantise_rows(numbers, scales))
    assert torch.equal(unpacked(packed(numbers)), numbers)


def test_a_scale_maps_the_largest_magnitude_of_a_group_to_seven() -> None:
    rows = rows_of((24, 256), torch.bfloat16)
    numbers, scales = quantise_rows(rows, 32)
    largest = rows.double().view(24, 8, 32).abs().amax(2)
    assert torch.equal(scales, torch.where(largest > 0, largest / 7, 1.0).float().bfloat16())
    assert int(numbers.abs().max()) == 7
    of_groups = numbers.view(24, 8, 32).abs().amax(2)
    assert bool((of_groups[largest > 0] == 7).all())
    assert scales[0, 0] == 1
    assert not numbers[0, :32].any()


def test_what_was_read_keeps_its_bytes() -> None:
    numbers, scales = quantise_rows(rows_of((24, 256), torch.float32, seed=1), 32)
    again, scales_again = quantise_rows(dequantise_rows(numbers, scales), 32)
    assert torch.equal(scales_again, scales)
    assert torch.equal(again, numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_quantised_weights_are_the_decoded_ones_and_pass_gradients_on_as_they_are(dtype: torch.dtype) -> None:
    weight = rows_of((8, 64), dtype).requires_grad_()
    found = fake_quantised(weight, 32)
    assert torch.equal(found, dequantise_rows(*quantise_rows(weight, 32)).to(dtype))
    gradient = torch.randn(8, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    found.backward(gradient)
    assert weight.grad is not None
    assert torch.equal(weight.grad, gradient)


def test_what_config_json_says_of_it_is_what_compressed_tensors_reads() -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from megarl.models.registry import architecture_for
    from tests.families import hugging_face

    config = hugging_face("mixtral").config.to_dict() | {"architectures": ["MixtralForCausalLM"]}
    said = int4(32).quantization_config(architecture_for(config).weight_map(config))
    read = quantization.QuantizationConfig.model_validate(said)
    weights = read.config_groups["group_0"].weights
    assert (weights.num_bits, weights.group_size, weights.symmetric, weights.strategy) == (4, 32, True, "group")
    assert read.format == "pack-quantized"
