"""What ai-toolkit 0.12.26 takes in each block, as plain data: key:kind, and the values of keys that name a choice.

Kinds are explained in `ai_toolkit_source`, which reads the same from an installed ai-toolkit; `SHIPPED` is what it read
from 0.12.26, for machines without one. A test compares the two.
"""

from __future__ import annotations

# Where the host's source says nothing about the kind, or something that its code contradicts.
KINDS: dict[str, dict[str, str]] = {
    block: dict(word.split(":") for word in words.split())
    for block, words in {
        "process": "type:str name:str? training_folder:str log_dir:str? device:str? trigger_word:str? "
        "training_seed:int? lorm_extract_mode_param:number|dict performance_log_every:int sqlite_db_path:str? "
        "do_lorm:bool torch_profiler:bool",
        "network_kwargs": "only_if_contains:list? ignore_if_contains:list? full_if_contains:list? "
        "parameter_threshold:number attn_only:bool rank_dropout:number? module_dropout:number?",
        "SampleConfig": "neg:any seed:int sample_every:int? sample_steps:int num_frames:int samples:list "
        "network_multiplier:number|str",
        "SampleItem": "neg:any prompt:str? network_multiplier:number|str",
        "NetworkConfig": "rank:int? linear:int? lokr_factor:int pretrained_lora_path:str?",
        "LoRMConfig": "extract_mode_param:number|dict",
        "SaveConfig": "save_every:int?",
        "LoggingConfig": "log_every:int?",
        "EmbeddingConfig": "tokens:int trigger_class_name:str?",
        "DecoratorConfig": "num_tokens:int",
        "TrainConfig": "optimizer_params:dict? gradient_accumulation:int gradient_accumulation_steps:int "
        "guidance_loss_target:number|list min_snr_gamma:number? snr_gamma:number? cfg_rescale:number? start_step:int? "
        "num_train_timesteps:int max_negative_prompts:int optimal_noise_pairing_samples:int target_norm_std:number? "
        "latent_feature_extractor_path:str? diffusion_feature_extractor_path:str? next_sample_timesteps:int",
        "ModelConfig": "name_or_path:str arch:str? vae_path:str? refiner_name_or_path:str? lora_path:str? "
        "assistant_lora_path:str? inference_lora_path:str? unconditional_lora_path:str? unet_path:str? "
        "te_name_or_path:str? accuracy_recovery_adapter:str? cache_size_limit:int? text_encoder_bits:int "
        "vae_device:str? "
        "te_device:str?",
        "DatasetConfig": "resolution:int|list random_triggers:list|str controls:list|str caption_type:str? "
        "control_path_1:str? control_path_2:str? control_path_3:str?",
    }.items()
}

SHIPPED: dict[str, str] = {
    "process": (
        "adapter:any datasets:any decorator:any device:str? do_lorm:bool embedding:any first_sample:any guidance:any "
        "log_dir:str? logging:any lorm_extract_mode:any lorm_extract_mode_param:number|dict model:any name:str? "
        "network:any performance_log_every:int sample:any save:any sqlite_db_path:str? torch_profiler:bool train:any "
        "training_folder:str training_seed:int? trigger_word:str? type:str"
    ),
    "NetworkConfig": (
        "all_layers:bool alpha:number conv:int? conv_alpha:number? dropout:number? layer_offloading:bool linear:int? "
        "linear_alpha:number? lokr_factor:int lokr_full_rank:bool lorm:any network_kwargs:dict old_lokr_format:bool "
        "pretrained_lora_path:str? rank:int? split_multistage_loras:bool transformer_only:bool type:str"
    ),
    "network_kwargs": (
        "attn_only:bool block_alphas:any block_dims:any conv_block_alphas:any conv_block_dims:any "
        "full_if_contains:list? full_train_in_out:any ignore_if_contains:list? is_ara:any is_assistant_adapter:any "
        "module_class:any module_dropout:number? modules_alpha:any modules_dim:any only_if_contains:list? "
        "parameter_threshold:number peft_format:any rank_dropout:number? target_conv_modules:any "
        "target_lin_modules:any varbose:any"
    ),
    "LoRMConfig": (
        "do_conv:bool extract_mode:str extract_mode_param:number|dict module_settings:list parameter_threshold:int"
    ),
    "SaveConfig": (
        "dtype:str hf_private:str|bool hf_repo_id:str? max_step_saves_to_keep:int push_to_hub:bool save_every:int? "
        "save_format:str"
    ),
    "DatasetConfig": (
        "alpha_mask:bool audio_normalize:bool audio_preserve_pitch:bool augmentations:list? augments:list "
        "auto_frame_count:bool batch_size:int? bucket_tolerance:int buckets:bool cache_clip_vision_to_disk:bool "
        "cache_latents:bool cache_latents_num_workers:int cache_latents_to_disk:bool cache_tensors_to_disk:bool "
        "cache_text_embeddings:bool caption_dropout_rate:number caption_ext:str caption_type:str? "
        "clip_image_augmentations:list? clip_image_from_same_folder:bool clip_image_path:str? "
        "clip_image_shuffle_augmentations:bool control_from_same_folder:bool control_path:str|list? "
        "control_path_1:str? control_path_2:str? control_path_3:str? control_transparent_color:list controls:list|str "
        "dataset_path:str? debug:bool default_caption:str? diff_output_preservation:bool "
        "diff_output_preservation_class:str do_audio:bool do_i2v:bool extra_values:list fast_image_size:bool "
        "flip_x:bool flip_y:bool folder_path:str? fps:int full_size_control_images:bool guidance_type:str "
        "inpaint_path:str|list? invert_mask:bool is_reg:bool keep_tokens:int load_image_when_caching_latents:bool "
        "loss_multiplier:number mask_min_value:number mask_path:str? network_weight:number "
        "num_controls_from_same_folder:int num_frames:int num_repeats:int num_workers:int poi:str? "
        "prefetch_factor:int prior_reg:bool random_crop:bool random_scale:bool random_triggers:list|str "
        "random_triggers_max:int replacements:list replay_transforms:bool resolution:int|list scale:number "
        "shrink_video_to_frames:bool shuffle_augmentations:bool shuffle_tokens:bool square_crop:bool "
        "standardize_images:bool token_dropout_rate:number trigger_word:str? trim_auto_frame_count_tail:bool type:str "
        "unconditional_path:str? use_short_captions:bool"
    ),
    "TrainConfig": (
        "adapter_assist_name_or_path:str? adapter_assist_type:str adapter_lr:number adaptive_scaling_factor:bool "
        "attention_backend:str audio_loss_multiplier:number batch_noise_correction_scale:number batch_size:int "
        "blank_prompt_preservation:bool blank_prompt_preservation_multiplier:number blended_blur_noise:bool "
        "bypass_guidance_embedding:bool cache_text_embeddings:bool cfg_rescale:number? cfg_scale:number "
        "content_or_style:str correct_pred_norm:bool correct_pred_norm_multiplier:number "
        "diff_output_preservation:bool diff_output_preservation_class:str diff_output_preservation_multiplier:number "
        "differential_guidance_scale:number diffusion_feature_extractor_path:str? "
        "diffusion_feature_extractor_weight:number disable_sampling:bool do_batch_noise_correction:bool "
        "do_blank_stabilization:bool do_cfg:bool do_differential_guidance:bool do_fft_loss:bool "
        "do_fft_velocity_equiv_weight:bool do_guidance_loss:bool do_guidance_loss_cfg_zero:bool "
        "do_paramiter_swapping:bool do_prior_divergence:bool do_random_cfg:bool do_signal_amplification:bool "
        "do_signal_correction_noise:bool dtype:str dynamic_noise_offset:bool ema_config:dict? embedding_lr:number "
        "force_consistent_noise:bool force_first_sample:bool free_u:bool gradient_accumulation:int "
        "gradient_accumulation_steps:int gradient_checkpointing:bool guidance_loss_schedule:str "
        "guidance_loss_target:number|list img_multiplier:number inverted_mask_prior:bool "
        "inverted_mask_prior_multiplier:number latent_feature_extractor_path:str? latent_feature_loss_weight:number "
        "latent_multiplier:number learnable_snr_gos:bool linear_timesteps:bool linear_timesteps2:bool loss_target:str "
        "loss_type:str lr:number lr_scheduler:str lr_scheduler_params:dict match_adapter_assist:bool "
        "match_adapter_chance:number match_noise_norm:bool max_cfg_scale:number max_denoising_steps:int "
        "max_grad_norm:number max_loss:number? max_loss_debug:bool max_negative_prompts:int "
        "merge_network_on_save:bool merge_network_on_save_strength:number min_denoising_steps:int "
        "min_snr_gamma:number? negative_prompt:any next_sample_timesteps:int noise_multiplier:number "
        "noise_offset:number noise_scheduler:str noisy_latent_multiplier:number num_train_timesteps:int "
        "optimal_noise_pairing_samples:int optimizer:str optimizer_params:dict? paramiter_swapping_factor:number "
        "pred_scaler:number prompt_dropout_prob:number prompt_saturation_chance:number random_noise_multiplier:number "
        "random_noise_shift:number refiner_lr:number reg_weight:number sdp:bool short_and_long_captions:bool "
        "short_and_long_captions_encoder_split:bool show_turbo_outputs:bool signal_amplification_strength:number "
        "signal_correction_noise_scale:number single_item_batching:bool skip_first_sample:bool snr_gamma:number? "
        "standardize_images:bool standardize_latents:bool start_step:int? steps:int switch_boundary_every:int "
        "t0_loss_target:bool t0_velocity_equiv_weight:bool target_noise_multiplier:number target_norm_std:number? "
        "target_norm_std_value:number text_encoder_lr:number timestep_type:str train_refiner:bool "
        "train_text_encoder:bool train_turbo:bool train_unet:bool unconditional_prompt:str unet_lr:number "
        "unload_text_encoder:bool validation_config:any weight_jitter:number xformers:bool"
    ),
    "EMAConfig": "ema_decay:number param_multiplier:number use_ema:bool use_feedback:bool",
    "ValidationConfig": "resolution:int validate_every_n_steps:int validation_items:list validation_sigmas:list",
    "ValidationItem": "image_path:str prompt:str",
    "ModelConfig": (
        "accuracy_recovery_adapter:str? arch:str? assistant_lora_path:str? attn_masking:bool auto_memory:bool "
        "block_compile:bool cache_size_limit:int? compile:bool compile_dynamic:bool compile_fullgraph:bool "
        "compile_mode:str dtype:str experimental_xl:bool extras_name_or_path:str? ignore_if_contains:list? "
        "in_context:bool inference_lora_path:str? is_auraflow:bool is_flux:bool is_lumina2:bool is_pixart:bool "
        "is_pixart_sigma:bool is_ssd:bool is_v2:bool is_v3:bool is_v_pred:bool is_vega:bool is_xl:bool "
        "latent_space_version:any layer_offloading:bool layer_offloading_text_encoder_percent:number "
        "layer_offloading_transformer_percent:number lora_path:str? low_vram:bool model_kwargs:dict model_paths:dict "
        "name_or_path:str only_if_contains:list? qtype:str qtype_te:str quantize:bool quantize_kwargs:dict "
        "quantize_te:bool refiner_name_or_path:str? refiner_start_at:number "
        "split_model_other_module_param_count_scale:number split_model_over_gpus:bool te_device:str? te_dtype:str "
        "te_name_or_path:str? text_encoder_bits:int unconditional_lora_path:str? unet_path:str? unet_sample_size:any "
        "use_flux_cfg:bool use_text_encoder_1:bool use_text_encoder_2:bool vae_device:str? vae_dtype:str "
        "vae_path:str?"
    ),
    "SampleConfig": (
        "adapter_conditioning_scale:number do_cfg_norm:bool extra_values:list format:str fps:int "
        "guidance_rescale:number guidance_scale:number height:int neg:any network_multiplier:number|str "
        "num_frames:int prompts:list refiner_start_at:number sample_every:int? sample_start_step:int sample_steps:int "
        "sampler:str samples:list seed:int walk_seed:bool width:int"
    ),
    "SampleItem": (
        "ctrl_idx:int ctrl_img:str? ctrl_img_1:str? ctrl_img_2:str? ctrl_img_3:str? do_cfg_norm:bool fps:int? "
        "guidance_scale:number? height:int? neg:any network_multiplier:number|str num_frames:int? prompt:str? "
        "sample_steps:int? seed:int? width:int?"
    ),
    "LoggingConfig": "log_every:int? project_name:str run_name:str? use_ui_logger:bool use_wandb:bool verbose:bool",
    "GuidanceConfig": "guidance_scale:number negative_prompt:str positive_prompt:str target_class:str",
    "EmbeddingConfig": "init_words:str save_format:str tokens:int trigger:str trigger_class_name:str?",
    "DecoratorConfig": "num_tokens:int",
    "AdapterConfig": (
        "adapter_type:str channels:list class_names:list clip_layer:any control_image_dropout:number "
        "conv_pooling:bool conv_pooling_stacks:int downscale_factor:int flux_only_double:bool "
        "has_inpainting_input:bool head_dim:int i2v_do_start_frame:bool ilora_down:bool ilora_mid:bool ilora_up:bool "
        "image_dir:str? image_encoder_arch:str image_encoder_path:str? in_channels:int "
        "invert_inpaint_mask_chance:number lora_config:dict? merge_scaler:bool name_or_path:any num_cloned_blocks:int "
        "num_control_images:int num_heads:int num_res_blocks:int num_tokens:any pixtral_max_image_size:int "
        "pixtral_random_image_size:int|bool quad_image:bool quantize_llm:bool safe_channels:int "
        "safe_reducer_channels:int safe_tokens:int scaler_lr:number? sparse_autoencoder_dim:int? "
        "subpixel_downscale_factor:int test_img_path:list? text_encoder_arch:str text_encoder_path:str? "
        "train:str|bool train_image_encoder:bool train_only_image_encoder:bool "
        "train_only_image_encoder_positional_embedding:bool train_scaler:bool trigger:str trigger_class_name:any "
        "type:str"
    ),
}

_SAMPLERS = (
    "flowmatch ddim ddpm pndm lms k_lms euler k_euler euler_a dpmsolver dpmsolver++ k_dpmsolver k_dpmsolver++ "
    "dpmsingle heun dpm_2 dpm_2_a lcm custom_lcm mean_flow"
)
_QTYPES = (
    "coat_fp8 qfloat8 qfloat8_e4m3fn qfloat8_e5m2 qint2 qint4 qint8 float8 int8 uint2 uint3 uint4 uint5 uint6 uint7 "
    "uint8 nvfp4 orbit2 orbit3 orbit4 orbitvq2 orbitvq3 orbitvq4 convrot4 convrot8 convrotbitnet convrotcomfyw4a4 "
    "convrotint2 convrotint3 convrotint4 convrotint5 convrotint6 convrotint7 convrotint8"
)
_DTYPES = "bf16 bfloat16 fp16 float16 half fp32 float32 float single"
CHOICES: dict[str, dict[str, tuple[str, ...]]] = {
    block: {key: tuple(words.split()) for key, words in keys.items()}
    for block, keys in {
        "NetworkConfig": {"type": "lora locon lycoris lorm lokr dora fullrank"},
        "ModelConfig": {"qtype": _QTYPES, "qtype_te": _QTYPES},
        "SaveConfig": {"dtype": f"{_DTYPES} 8bit e4m3fn float8", "save_format": "diffusers safetensors"},
        "SampleConfig": {"sampler": _SAMPLERS, "format": "jpg png webp"},
        "TrainConfig": {
            "dtype": _DTYPES,
            "noise_scheduler": _SAMPLERS,
            "content_or_style": "balanced style content",
            "loss_target": "noise source unaugmented differential_noise",
            "loss_type": "mse mae wavelet stepped mean_flow pseudo_huber",
            "timestep_type": "sigmoid linear shift flux_shift lumina2_shift lognorm_blend weighted next_sample "
            "one_step "
            "two_step four_step eight_step",
            "optimizer": "coat_fp8_adamw adamw adamw8bit adamw8 adam adam8bit adam8 ademamix8bit lion lion8bit adagrad "
            "adafactor automagic automagic2 automagic3 automagicexperiment prodigy prodigy8bit dadaptation "
            "dadaptationadam dadaptationlion",
            "lr_scheduler": "constant constant_with_warmup linear cosine cosine_with_restarts step polynomial "
            "piecewise_constant",
        },
    }.items()
}
RANGES: dict[str, dict[str, dict[str, float]]] = {
    "NetworkConfig": {"linear": {"minimum": 1}, "rank": {"minimum": 1}},
    "TrainConfig": {
        "steps": {"minimum": 1},
        "batch_size": {"minimum": 1},
        "lr": {"above": 0, "example": 1e-4},
        "gradient_accumulation": {"minimum": 1},
    },
    "EMAConfig": {"ema_decay": {"minimum": 0, "maximum": 1}},
    "DatasetConfig": {
        "num_repeats": {"minimum": 1},
        "caption_dropout_rate": {"minimum": 0, "maximum": 1},
        "token_dropout_rate": {"minimum": 0, "maximum": 1},
    },
    "SampleConfig": {"width": {"minimum": 64}, "height": {"minimum": 64}, "sample_steps": {"minimum": 1}},
}
ANY_CASE = ("optimizer", "type")  # the host lowers these before it compares

# block: key of it -> block in it; [] marks a list of blocks
BLOCKS: dict[str, dict[str, str]] = {
    block: dict(word.split(":") for word in words.split())
    for block, words in {
        "process": "network:NetworkConfig train:TrainConfig model:ModelConfig save:SaveConfig sample:SampleConfig "
        "first_sample:SampleConfig logging:LoggingConfig guidance:GuidanceConfig datasets:[]DatasetConfig "
        "embedding:EmbeddingConfig decorator:DecoratorConfig adapter:AdapterConfig",
        "NetworkConfig": "network_kwargs:network_kwargs lorm:LoRMConfig",
        "TrainConfig": "ema_config:EMAConfig validation_config:ValidationConfig",
        "ValidationConfig": "validation_items:[]ValidationItem",
        "SampleConfig": "samples:[]SampleItem",
        "AdapterConfig": "lora_config:NetworkConfig",
    }.items()
}
