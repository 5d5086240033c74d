"""Every tolerance of the tests, with its reason. Floors are SQNR in dB (see `coat_core.quantize.sqnr_db`).

Three kinds of error are never mixed: exact (no number needed, `assert_bitwise`), SQNR floor (quantized against high
precision) and allclose (high precision in another order).
"""

import math

# --- quantization ----------------------------------------------------------------------------------------------------
# Gaussian round trip, relative error within half an ulp. Measured 31.5-33 dB for e4m3 and 25.6-27 dB for e5m2 over all
# granularities and input dtypes.
GAUSSIAN_FLOOR_DB = {"e4m3": 31.5, "e5m2": 25.5}
# A linear layer's initial weights are uniform. Seen 31.47 and 25.41 dB (torch 2.9), 31.6 and 25.5 (torch 2.13).
UNIFORM_FLOOR_DB = {"e4m3": 31.2, "e5m2": 25.2}
# NVFP4 weights of 3072 columns, scales searched. Measured 21.67, 21.4 and 21.98 dB; NF4 has 20.7, 19.6 and 17.0.
NVFP4_FLOOR_DB = {"gauss": 21.5, "student": 21.2, "outlier columns": 21.7}
# Gaussian data scaled to its own amax: e4m3 loses what is under sigma·5/448/1024. Measured at most 1e-5.
GAUSSIAN_UNDERFLOW = 1e-4
# Slack, relative to the element, of a bound in float64 where the code divides and multiplies by the scale in fp32.
FP32_ROUNDING = 2.0**-22

# A linear's product with x and W in INT8 per row, rotated in blocks of 256, K = 3072: measured 36.0 to 42.1 dB over 12
# seeds of each kind of input, where e4m3 per row has 27.8 to 31.0.
INT8_FLOOR_DB = 35.5
# dgrad of dy, Gaussian or with 3 of 256 channels 100 times larger, by such a weight. Measured 36.8 to 39 dB.
INT8_GRADIENT_FLOOR_DB = 36.0
# Prediction and every LoRA gradient of tiny FLUX with all products in INT8, saved tensors in e4m3: measured 23.7 dB and
# more, 33 on average, where e4m3 has 12.9 and 22.
INT8_FLUX_FLOOR_DB = 22.0

# Constant blocks come back through at most 7 fp32 roundings of 2^-24, and pow's own 2 ulp.
CONSTANT_BLOCK_REL = 2.0**-20
# k is rounded down to a multiple of the step: where the unrounded k is this near to a multiple (relative), fp32 may
# fall on the other side. log2 of magnitudes near 2^-26 errs by 2^-20, on spreads of 0.7 and more: 3e-6, times 7.
EXPONENT_BOUNDARY = 2e-5
# The number of round-ups among n draws is binomial; 5 standard deviations are exceeded by chance once in 1.7 million.
STOCHASTIC_DRAWS = 100_000
STOCHASTIC_SIGMAS = 5.0
# Noise power averaged over segments against that of the whole Gaussian tensor: measured 0.02 to 0.05 dB.
LOCAL_SQNR_DB = 0.1
# Sums of up to 128 squares in fp32 in another order.
FP32_SUM_RTOL = 1e-5

# --- FP8AdamW --------------------------------------------------------------------------------------------------------
# How many times lower than plain e4m3's the squared error of the update m/(sqrt(v) + eps) of real LoRA moments must be
# with range expansion. The acceptance line asks for 2.5 at steps 100 and 400 of the long run (RESULTS.md).
EXPANSION_GAIN = 2.0
# uint8_log in natural logarithms beyond half a code: log2 of up to 149 in fp32 is known to 2^-17, twice, and exp2 of as
# much is too. Only blocks whose values span all of fp32 come near.
LOG_GRID_REL = 8 * 2.0**-16
# A value over its scale is 127 up to the rounding of both, and so is a sqrt on each side.
SINGLE_MAGNITUDE_REL = 8 * 2.0**-24
# How many times lower than that of expanded e4m3 the squared error of the update must be, at steps 1 and 2 and from
# step 10 on. The acceptance line asks for 1/1.2 and 2; measured 5 and more: RESULTS.md.
INTEGER_FORMATS_GAIN = (1.0, 4.0)

# The kernel, one step from the same state. Powers are exp2(k·log2(x)): codes may fall on the other side of a rounding
# boundary. Measured in the interpreter 64 of 2.85 million; the GPU's log2 errs by 2^-22 where k is up to 256.
ADAMW_KERNEL_CODES_OFF = 1e-3
# Scales, exponents, centers: the smallest value of a block decides, and of old moment and gradient only a difference of
# 1e-3 of both may be left there. Measured at most 3.5e-3 in 171,000 blocks.
ADAMW_KERNEL_NUMBERS_RTOL = 2e-2
# Moments and how far a parameter moved, relative to the largest of the block and to the step: powers bring moments back
# with 2^-18 relative error.
ADAMW_KERNEL_UPDATE_RTOL = 1e-4
# Error of 20 steps with FP8 moments, kernel over reference: two draws of the same noise. Measured 0.998 to 1.01.
ADAMW_KERNEL_ERROR_RTOL = 0.15
# For CUDA graphs: scalars from fp64 on the device against Python's floats, both rounded once to fp32; with FP8 moments
# that may turn a code, for a change of the parameter far below lr = 1e-3.
CAPTURABLE_PARAM_RTOL = 1e-5

# --- FP8 products and linears ----------------------------------------------------------------------------------------
# Products of FP8 codes are exact in fp32; order of summation, two scales and the last rounding differ. fp32: sums of 48
# terms lose at most 20 of 144 dB. bf16: half an ulp is 2^-9, measured 53-56 dB over shapes down to [1, 32].
SCALED_MM_FP32_FLOOR_DB = 124.0
SCALED_MM_BF16_FLOOR_DB = 50.0


def product_floor_db(*formats: str) -> float:
    """SQNR of a product of Gaussian operands, each at its round-trip floor: independent errors add up in power.

    Two e4m3 operands give 28.5 dB, e5m2 and e4m3 24.5, two e5m2 22.5; "bf16" counts as exact. Measured at most 0.3 dB
    below (few elements) and up to 1 dB above.
    """
    noise = sum(10 ** (-GAUSSIAN_FLOOR_DB[name] / 10) for name in formats if name != "bf16")
    return -10 * math.log10(noise) - 0.3


# The same FP8 values with the scales inside instead of after the sum: a few units of 2^-24 of the largest term.
FP32_ORDER_FLOOR_DB = 110.0
# bf16 or fp16 in another order: each of x, y and the sum rounds once or twice to 8 (bf16) bits, 2^-9 each.
BF16_ORDER_FLOOR_DB = 45.0
# What casting dy adds to one output feature of dW, wgrad in FP8 over 509 tokens, relative to the root of the sum of
# squared products. Over 20 seeds measured 28.6 and 22.6 dB and more; where x is per_tensor and few tokens are much
# larger than the others 26.5 and 20.8.
WGRAD_FEATURE_FLOOR_DB = {"e4m3": 25.5, "e5m2": 20.0}
# Gradients through one block whose saved tensors are FP8 (weights and GEMMs are not), against the exact ones.
# Measured at least 26.1 dB (e4m3) and 17.9 (e5m2) over four seeds, lowest for the gate: a sum over tokens that cancels.
PACKED_GRADIENT_FLOOR_DB = {"e4m3": 24.0, "e5m2": 17.0}
# dq, dk, dv from FP8 q, k, v and out: DESIGN measured 25.3, 25.4 and 28.3 dB.
ATTENTION_GRADIENT_FLOOR_DB = 24.0
# Gradients of blocks recomputed from their FP8 inputs, against the exact ones. Measured at least 29.7 dB (e4m3) and
# 23.4 dB (e5m2) for one block; three in a row are no worse.
CHECKPOINT_GRADIENT_FLOOR_DB = {"e4m3": 27.0, "e5m2": 21.0}
# y of a 256 → 128 linear, e4m3 inputs and Gaussian weights in e4m3 (e5m2), against the bf16 one: `product_floor_db`,
# less 1 dB for so few elements.
AITK_FORWARD_FLOOR_DB = {"e4m3": 27.5, "e5m2": 23.6}
# 101 round trips that all choose the same codes: fp32 rounding of exponent, center and two powers. Measured 9e-5
# (e4m3) and 4e-5 (e5m2) in the worst element; the paper kernel's constants drift by 0.2.
REPEATED_ROUND_TRIP_REL = 5e-4

# --- models under COAT -----------------------------------------------------------------------------------------------
# The embedded model (width 64, random weights) against bf16. Weights alone in FP8 already move its output to 30 dB and
# the modulation adapters' gradients, sums over tokens that cancel, to cosine 0.974; all of COAT: 29.4 dB, lowest cosine
# 0.966, mean 0.9954. DESIGN section 4 has the numbers at d = 3072.
FLUX_OUTPUT_FLOOR_DB = 27.0
FLUX_GRADIENT_COSINE = 0.95
FLUX_GRADIENT_COSINE_MEAN = 0.993
# Two steps of its pipeline, decoded, against bf16's: 34.6 dB (layerwise casting) to 37; a LoRA left out: 22 or less.
PIPELINE_FLOOR_DB = 32.0

# Random UNets, SD3, CogVideoX, Wan of width 64 and 128 against bf16. FP8 weights alone move a random UNet's output to
# 29 dB, SD3's (gated residuals) to more than 40; with FP8 GEMMs too: 26.0 to 27.2 (UNets), 41.5 and more (others).
ARCHITECTURE_OUTPUT_FLOOR_DB = 24.0
# LoRA gradients' cosine with bf16's. In a UNet's self-attention the gradient of v's A is a sum over thousands of
# near-equal tokens that nearly cancels: the same COAT step with other instructions (AVX2, AVX-512, AMX) has a cosine of
# 0.957 with itself there, no nearer than bf16 (0.940 to 0.993). What does not depend on the order of sums: all together
# 0.9976 to 0.9986, mean 0.9944 to 0.9965, 5 % quantile 0.9891 to 0.9940, lowest of the other adapters 0.9858 to 0.9934.
# With proj_in and proj_out in FP8, whose error reaches v and out, mean and quantile were 0.983 and 0.965.
# Transformers: together 0.9991, mean 0.9979, 5 % quantile 0.9947, lowest 0.9912.
ARCHITECTURE_GRADIENT_COSINE = {
    "UNet": {"together": 0.9965, "mean": 0.993, "5 % quantile": 0.985, "lowest": 0.97, "self-attention's v": 0.9},
    "transformer": {"together": 0.998, "mean": 0.995, "5 % quantile": 0.98, "lowest": 0.98, "self-attention's v": 0.98},
}
# Packing alone, weights and GEMMs in bf16: the lowest of all adapters. Measured 0.9939 (UNet), 0.9971 (others).
PACKED_GRADIENT_COSINE = 0.99
# Bytes kept for backward in bf16 over COAT's, kept and recomputed. Measured 2.68 and 12.0 (UNet), 2.64 to 2.94 and at
# least 14.6 (others).
ARCHITECTURE_KEPT_RATIO = {"UNet": (2.5, 10.5), "transformer": (2.5, 13.0)}
# Small models of every arch of ai-toolkit (tests/helpers/aitk_archs.py): cosine of all LoRA gradients together with
# bf16's; of the adapter with the lowest; and bytes that the blocks keep in bf16 over COAT's. Measured at least 0.9930,
# 0.9252, 2.5, of UNets 0.9976, 0.9710 and 2.7: docs/models.md. A UNet's lowest is the A of self-attention's v, as
# above: by instruction set 0.9721 (AVX-512 with bf16), 0.9710 (without), 0.9800 (AVX2), 0.9827 on another CPU.
ARCH_GRADIENT_COSINE = 0.99
ARCH_LOWEST_COSINE = {"UNet": 0.95, "transformer": 0.9}
ARCH_FEWER_BYTES = {"UNet": 2.6, "transformer": 2.5}

# Tiny FLUX, every adapter's gradient, GPU against CPU: sums in another order move values across FP8 codes, as compiling
# does. Not measured yet.
GPU_STEP_FLOOR_DB = 18.0

# --- operators of the fused flow and their kernels -------------------------------------------------------------------
# LayerNorm+modulate and RMSNorm+rotary backward against float64: fp32 inside, one rounding at the end. Measured over
# three seeds, with outlier channels of 1000x and heavy tails: fp32 129-149 dB, bf16 52.8-62.5 dB.
NORM_BACKWARD_FP32_FLOOR_DB = 120.0
NORM_BACKWARD_BF16_FLOOR_DB = 51.0
# dq, dk, dv of attention whose q, k, v and out went through e4m3 with 1x128 groups, Gaussian data, 4 heads x 320 x 128:
# measured over three seeds 25.3-25.4, 25.4, 28.2-28.3 dB.
ATTENTION_FP8_FLOOR_DB = (24.0, 24.0, 27.0)
# One FLUX block, all kept as it is: fp32 operations in another order; and bf16, where diffusers' backward rounds
# between its operations and the fused one mostly does not (relative error of norms). At most 3.7e-7 and 1.04e-2 seen.
FUSED_FP32_RTOL = 2e-6
FUSED_BF16_RTOL = 2e-2
# Z-Image's block, which norms what its linears made: own code and fused one differ from float64 by up to 1.65e-2 and
# 1.73e-2 (gradients of q and of the modulation), and from each other by up to 2.07e-2.
FUSED_NORMED_BF16_RTOL = 3e-2
# LoRA B after 6 steps in ai-toolkit, a COAT flow against high precision activations, same draws: measured 0.989.
FLOW_DIRECTION_COSINE = 0.97

# Kernels of non-linear operators in fp32: sums in another order than torch's, of the row's largest magnitude. Measured
# 4.2e-7 (RMSNorm and rotary, d = 128).
KERNEL_ROW_RTOL = 2e-6
# GELU by sigmoid(2u) instead of (1 + tanh u)/2, of abs(x); its derivative, of abs(grad)·(1 + abs(x)): both forms round
# a handful of times. Measured 2.1e-7 and 3.3e-7.
GELU_RTOL = 5e-7
# Kernel's GELU of x within ±5 relative to itself, where torch's loses digits at negative x. Measured 2.3e-6.
GELU_RELATIVE_RTOL = 1e-5
# Kernel's SwiGLU relative to gate·up, and its gradients to what they multiply: a sigmoid and three products in fp32.
SILU_RTOL = 5e-7
# One step of bf16: a value between two may be rounded to either.
BF16_ULP_RTOL = 2.0**-7
# The flow by kernels, interpreted, in fp32: a few values fall to the neighbouring FP8 code.
KERNEL_FLOW_FLOOR_DB = 30.0

# --- trainers and their data -----------------------------------------------------------------------------------------
# Two processes against one with accumulation 2, the same draws: only (g0 + g1)/2 is summed as g0/2 + g1/2. Losses agree
# to fp32 rounding carried through a few steps at lr 1e-2; AdamW's first steps may turn where a gradient is near zero.
PROCESSES_LOSS_RTOL = 1e-5
PROCESSES_LORA_RTOL = 1e-2
PROCESSES_LORA_ATOL = 1e-4
# Inside ai-toolkit, gradients summed in another order: g0 + g1 + g2 in one process, a ring of three. Equal to 1e-7 for
# two steps, then some FP8 codes round the other way; ‖difference‖/‖LoRA‖ measured 2.4e-3 after four steps (two: 0).
PROCESSES_FIRST_STEPS = 2
PROCESSES_LORA_DISTANCE = 5e-3
# Full fine-tuning, three gradients in bf16 summed in another order: ‖difference‖/‖change‖ after one step, 3.2e-3.
FULL_PROCESSES_DISTANCE = 1e-2
# With the embedding that all blocks share trained, its gradient is added up in another order (bf16, 3e-3 apart in the
# first step): losses of four steps at lr 1e-3 within 1.7e-3.
FULL_PROCESSES_LOSS_RTOL = 1e-2
# The same formula in fp32 in another order: a few units in the last place of numbers near 1.
FP32_ORDER_RTOL = 1e-5
FP32_ORDER_ATOL = 1e-6
# Sigmas and learning-rate factors lie in [0, 1]; linspace and the shift in fp32 against float64 or the scheduler's own.
SIGMA_ATOL = 1e-6
# Mean of 20,000 draws of u³ (standard deviation 0.28): five standard errors, plus the grid of 1000 levels.
CUBIC_MEAN_ATOL = 0.012
# Linux counts resident pages per CPU and adds them up in batches: its peak may trail a reading by a few hundred pages.
RESIDENT_SLACK_BYTES = 4 * 2**20
# Loss of a bf16 forward of the tiny model against fp32's: bf16 keeps 8 bits, the error averages out over the elements.
BF16_LOSS_RTOL = 2e-2
# 8-bit levels of a flat black or white area through JPEG at quality 100, greyscale or CMYK: quantization steps are 1.
JPEG_LEVELS = 2
# 8-bit levels of sRGB through lcms (to sRGB, or with two primaries exchanged): rounding in and out; measured 0-1.
ICC_LEVELS = 2
# Standard deviations of an observed caption dropout rate; exceeded by chance once in 16,000, and the seed is fixed.
DROPOUT_SIGMAS = 4.0
# A malformed folder of three or four small photos: answered in under 0.1 s; the rest is for a busy machine.
BAD_DATASET_SECONDS = 2.0
# Masked losses of the same batch, ours in fp32 against ai-toolkit's: it rounds masks to fp16 and then to train.dtype,
# relative errors of 2^-11, and 2^-8 in bf16, in which it also computes their mean. Measured 1.4e-5 and 3.7e-3.
MASKED_LOSS_FP32, MASKED_LOSS_BF16 = 2.0**-12, 2.0**-7
# Norm of up · down from fp32 r x r matrices of scaled values, against the product in fp64: sums of 64 products.
LORA_NORM_RTOL = 1e-5
# The same products in fp64 from the same fp32 matrices, with zeros between them.
LORA_DELTA_RTOL = 1e-12
# Share of 24 unseen prompts drawn right, by attribute (200 are scored in RESULTS.md), and the share of pictures
# that chance alone lets pass for another prompt's: 1 in 1440 if all were equally likely.
MINI_FLUX_ACCURACY = 0.9
MINI_FLUX_CHANCE = 0.1
# Our 27 points against the 1000 of ai-toolkit's `timestep_type: weighted`: its first 60 zigzag by a percent.
WEIGHTED_TIMESTEPS_MAX = 0.015
WEIGHTED_TIMESTEPS_RMS = 0.002

# --- plan and reports ------------------------------------------------------------------------------------------------
# Predicted bytes that a whole model keeps for backward against the profiler's count on a CPU: 5 % is what was promised.
# Measured within 0.4 % on 52 configurations in bf16; what is left are vectors of one row per image.
PLAN_KEPT_RTOL = 0.02
# The same of small models of other families, with six blocks a list: what was promised; measured within 2.7 %, most of
# it what the last block drops, and weights within 0.1 %.
PLAN_MODELS_RTOL = 0.05
# The most that a step holds besides weights, predicted against the count of a whole pass on the meta device with few
# blocks, where temporaries weigh most. Measured within 0.5 %, and 3.5 % above with recomputation.
PLAN_MOMENT_RTOL = 0.05
# All that a step of full fine-tuning holds, weights, moments and activations: what was asked for.
PLAN_FULL_RTOL = 0.02
# Times of ANCHORS' table, which is rounded to 0.1 ms and takes LoRA as 0.75 % of the linears.
ANCHOR_TIME_RTOL = 0.005

# One block at d = 256 and 128 tokens, e4m3 per_row with e5m2 gradients, against bf16. The output: what is asked at
# d = 3072 (measured 44-53 dB). Adapter gradients: the median of all is above what is asked there of the lowest
# (measured 21.4-23.2 dB); here one draw of inputs decides the lowest: measured 16.0-21.8 dB over 15 draws.
BLOCK_OUTPUT_FLOOR_DB = 27.0
# What the fused flow may add to the error of the block's own code with the same FP8 linears. In Z-Image's blocks norms
# after linears bring what those made to the size of the stream, error included: 24.4 to 28.0 dB both ways.
FP8_OUTPUT_LOSS_DB = 0.3
BLOCK_GRADIENT_FLOOR_DB = 18.0
SMALL_BLOCK_GRADIENT_FLOOR_DB = 15.0
# Saved activations of a tiny run, counted, against the plan: counted are also the batch's noise, inputs and loss.
REPORT_SAVED_RTOL = 0.1
# Losses of a few steps of the same task, COAT against bf16. Measured within 0.3 % (tiny FLUX) and 0.4 % (residual
# layers): a benchmark whose losses differ more does not compare the same training.
BENCH_LOSS_RTOL = 0.01
