"""The keys ai-toolkit 0.12.26 reads for image LoRA jobs that the stand-alone trainer does not have, as plain data.

`NO_EFFECT`: the key changes nothing in a FLUX.1 LoRA run, whatever its value; accepted, and reported unless empty.
`UNSUPPORTED`: key → ai-toolkit's default; with that value the key changes nothing, any other value is refused. None
stands for a default that follows another key.
"""

# ruff: noqa: SIM905 - as words the names are easier to compare with the host's than one per line

from __future__ import annotations

from typing import Any

HOST_VERSION = "0.12.26"

_WEB_UI = "for ai-toolkit's web UI; no effect here"
_NO_CONV = "FLUX has no convolution to adapt; no effect, as in ai-toolkit"
_OTHER_TYPE = "not used by type: lora; no effect"
_SPEED = "only speed; the stand-alone trainer chooses it itself"
_OFF = "belongs to a feature that is off; no effect"
_HUB = "only used with push_to_hub, which is off; no effect"
_COMPILE = "only used with compile, which is off; no effect"
_OFFLOAD = "only used with layer_offloading, which is off; no effect"
_DTYPE = "ai-toolkit overwrites it with train.dtype; no effect"
_TEXT = "the stand-alone trainer does not quantize the text encoders, which only encode captions and prompts"
_OTHER_MODEL = "not used by FLUX.1; no effect, as in ai-toolkit"

NO_EFFECT: dict[str, dict[str, str]] = {
    "process": {"sqlite_db_path": _WEB_UI},
    "network": {
        "conv": _NO_CONV,
        "conv_alpha": _NO_CONV,
        "lokr_full_rank": _OTHER_TYPE,
        "lokr_factor": _OTHER_TYPE,
        "old_lokr_format": _OTHER_TYPE,
        "split_multistage_loras": _OTHER_MODEL,
    },
    "save": {
        "save_format": "on FLUX ai-toolkit always writes the diffusers layout; so does the stand-alone trainer",
        "hf_repo_id": _HUB,
        "hf_private": _HUB,
    },
    "dataset": {
        "bucket_tolerance": "on FLUX ai-toolkit replaces it by 32; so does the stand-alone trainer",
        "num_workers": _SPEED,
        "prefetch_factor": _SPEED,
        "cache_latents_num_workers": _SPEED,
        "mask_min_value": _OFF,
        "shrink_video_to_frames": _OTHER_MODEL,
        "trim_auto_frame_count_tail": _OTHER_MODEL,
        "fps": _OTHER_MODEL,
        "diff_output_preservation_class": _OFF,
        "random_triggers_max": _OFF,
        "num_controls_from_same_folder": _OFF,
        "control_transparent_color": _OFF,
        "full_size_control_images": _OFF,
        "guidance_type": _OFF,
        "replay_transforms": _OFF,
        "keep_tokens": _OFF,
    },
    "train": {
        "diff_output_preservation_multiplier": _OFF,
        "diff_output_preservation_class": _OFF,
        "blank_prompt_preservation_multiplier": _OFF,
        "switch_boundary_every": _OTHER_MODEL,
        "train_refiner": _OTHER_MODEL,
        "audio_loss_multiplier": _OTHER_MODEL,
        "merge_network_on_save_strength": _OFF,
        "adapter_assist_type": _OFF,
        "batch_noise_correction_scale": _OFF,
        "signal_amplification_strength": _OFF,
        "signal_correction_noise_scale": _OFF,
        "max_negative_prompts": _OFF,
        "inverted_mask_prior_multiplier": _OFF,
        "correct_pred_norm_multiplier": _OFF,
        "target_norm_std_value": _OFF,
        "next_sample_timesteps": _OFF,
        "paramiter_swapping_factor": _OFF,
        "latent_feature_loss_weight": _OFF,
        "diffusion_feature_extractor_weight": _OFF,
        "guidance_loss_target": _OFF,
        "guidance_loss_schedule": _OFF,
        "differential_guidance_scale": _OFF,
        "unconditional_prompt": _OFF,
    },
    "model": {
        "dtype": _DTYPE,
        "block_compile": _COMPILE,
        "compile_mode": _COMPILE,
        "compile_fullgraph": _COMPILE,
        "compile_dynamic": _COMPILE,
        "cache_size_limit": _COMPILE,
        "layer_offloading_transformer_percent": _OFFLOAD,
        "layer_offloading_text_encoder_percent": _OFFLOAD,
        "refiner_start_at": _OTHER_MODEL,
        "use_text_encoder_1": _OTHER_MODEL,
        "use_text_encoder_2": _OTHER_MODEL,
        "split_model_other_module_param_count_scale": _OFF,
        "latent_space_version": _OTHER_MODEL,
        "unet_sample_size": _OTHER_MODEL,
        "text_encoder_bits": _OTHER_MODEL,
        "quantize_te": _TEXT,
        "qtype_te": _TEXT,
        "low_vram": "the stand-alone trainer always quantizes on the CPU, before the transformer meets the GPU",
    },
    "sample": {
        "neg": "FLUX.1 samples without a negative prompt; no effect",
        "fps": _OTHER_MODEL,
        "refiner_start_at": _OTHER_MODEL,
        "adapter_conditioning_scale": _OFF,
        "guidance_rescale": _OTHER_MODEL,
    },
    "sample_item": {
        "neg": "FLUX.1 samples without a negative prompt; no effect",
        "fps": _OTHER_MODEL,
        "ctrl_idx": _OFF,
    },
    "logging": {"use_ui_logger": _WEB_UI},
}

_TRAIN_OFF = (
    "xformers sdp train_turbo show_turbo_outputs learnable_snr_gos force_first_sample merge_network_on_save free_u "
    "do_signal_correction_noise do_batch_noise_correction do_signal_amplification adaptive_scaling_factor "
    "match_noise_norm short_and_long_captions short_and_long_captions_encoder_split single_item_batching "
    "match_adapter_assist inverted_mask_prior diff_output_preservation blank_prompt_preservation standardize_images "
    "standardize_latents dynamic_noise_offset do_cfg do_random_cfg correct_pred_norm t0_loss_target "
    "t0_velocity_equiv_weight do_fft_loss do_fft_velocity_equiv_weight do_prior_divergence unload_text_encoder "
    "do_paramiter_swapping force_consistent_noise blended_blur_noise do_guidance_loss "
    "do_guidance_loss_cfg_zero do_differential_guidance do_blank_stabilization max_loss_debug"
).split()
_TRAIN_NONE = (
    "unet_lr text_encoder_lr refiner_lr embedding_lr adapter_lr min_snr_gamma snr_gamma start_step "
    "adapter_assist_name_or_path negative_prompt target_norm_std max_cfg_scale cfg_rescale "
    "latent_feature_extractor_path diffusion_feature_extractor_path max_loss validation_config"
).split()
_DATASET_OFF = (
    "diff_output_preservation random_scale random_crop is_reg prior_reg flip_y control_from_same_folder alpha_mask "
    "invert_mask use_short_captions cache_tensors_to_disk cache_clip_vision_to_disk load_image_when_caching_latents "
    "standardize_images shuffle_augmentations clip_image_from_same_folder clip_image_shuffle_augmentations square_crop "
    "auto_frame_count debug fast_image_size do_i2v do_audio audio_preserve_pitch audio_normalize"
).split()
_DATASET_NONE = (
    "batch_size dataset_path trigger_word random_triggers augments control_path control_path_1 control_path_2 "
    "control_path_3 inpaint_path mask_path unconditional_path poi augmentations caption_type clip_image_path "
    "clip_image_augmentations replacements extra_values controls"
).split()
_MODEL_OFF = (
    "is_v2 is_xl is_pixart is_pixart_sigma is_auraflow is_v3 is_lumina2 use_flux_cfg is_ssd is_vega is_v_pred "
    "experimental_xl attn_masking split_model_over_gpus auto_memory layer_offloading compile in_context"
).split()
_MODEL_NONE = (
    "vae_path refiner_name_or_path lora_path assistant_lora_path inference_lora_path unconditional_lora_path unet_path "
    "vae_device vae_dtype te_device te_dtype ignore_if_contains only_if_contains quantize_kwargs te_name_or_path "
    "accuracy_recovery_adapter model_kwargs model_paths"
).split()

UNSUPPORTED: dict[str, dict[str, Any]] = {
    "process": dict.fromkeys(
        ("first_sample", "guidance", "embedding", "decorator", "adapter", "slider", "lorm_extract_mode"), None
    )
    | {"do_lorm": False, "lorm_extract_mode_param": None, "torch_profiler": False},
    "network": {"lorm": None, "layer_offloading": False, "pretrained_lora_path": None, "all_layers": False},
    "network_kwargs": {"full_if_contains": None, "parameter_threshold": 0.0, "attn_only": False},
    "save": {},
    "dataset": dict.fromkeys(_DATASET_OFF, False)
    | dict.fromkeys(_DATASET_NONE)
    | {"type": "image", "scale": 1.0, "network_weight": 1.0, "token_dropout_rate": 0.0, "loss_multiplier": 1.0}
    | {"num_frames": 1},
    "train": dict.fromkeys(_TRAIN_OFF, False)
    | dict.fromkeys(_TRAIN_NONE)
    | {
        "attention_backend": "native",
        "cfg_scale": 1.0,
        "img_multiplier": 1.0,
        "latent_multiplier": 1.0,
        "loss_target": "noise",
        "match_adapter_chance": 0.0,
        "noise_multiplier": 1.0,
        "noise_offset": 0.0,
        "noisy_latent_multiplier": 1.0,
        "num_train_timesteps": 1000,
        "optimal_noise_pairing_samples": 1,
        "pred_scaler": 1.0,
        "prompt_dropout_prob": 0.0,
        "prompt_saturation_chance": 0.0,
        "random_noise_multiplier": 0.0,
        "random_noise_shift": 0.0,
        "reg_weight": 1.0,
        "target_noise_multiplier": 1.0,
        "weight_jitter": 0.0,
    },
    "model": dict.fromkeys(_MODEL_OFF, False) | dict.fromkeys(_MODEL_NONE),
    "sample": {"network_multiplier": 1, "extra_values": None, "num_frames": 1, "do_cfg_norm": False},
    "sample_item": {"network_multiplier": 1, "num_frames": 1, "do_cfg_norm": False}
    | dict.fromkeys(("ctrl_img", "ctrl_img_1", "ctrl_img_2", "ctrl_img_3")),
}
