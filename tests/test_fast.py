"""The tests of ``make test-fast``: one case per claim, in about two minutes.

Without ``[...]``, the first case of a parametrised test runs.
"""

import pytest

_TESTS = {
    "architecture/test_rooms.py": (
        "test_import_needs_only_the_standard_library",
        "test_every_room_is_listed",
        "test_imports_have_no_cycle",
        "test_versions_are_read_in_compat_only",
    ),
    "checkpoint/test_hf_writer.py": (
        "test_a_file_equals_that_of_save_file",
        "test_the_manifest_lists_every_tensor",
    ),
    "checkpoint/test_damaged_reader.py": (
        "test_the_index_may_contain_only_allowed_names",
        "test_read_refuses_a_damaged_chunk",
    ),
    "checkpoint/test_staging.py": (
        "test_a_full_disk_leaves_the_old_directory",
        "test_a_kill_between_the_two_renames_loses_nothing",
        "test_a_second_writer_is_refused_until_the_first_is_killed",
    ),
    "checkpoint/test_torch_dist_writer.py": ("test_round_trip_of_any_tensor",),
    "cli/test_compare.py": ("test_a_failure_of_the_first_run_ends_the_command",),
    "cli/test_doctor.py": ("test_this_environment_can_train",),
    "cli/test_help.py": ("test_light_commands_import_nothing_heavy",),
    "cli/test_hostile_input.py": ("test_a_terminated_command_leaves_no_partial_output",),
    "cli/test_launch.py": ("test_dry_run_prints_the_command_for_a_shell",),
    "cli/test_params.py": (
        "test_the_papers_digits_are_printed",
        "test_the_documents_quote_the_shares_that_params_prints",
    ),
    "cli/test_plan.py": ("test_json_adds_up",),
    "compare/test_page.py": ("test_the_tables_hold_the_numbers",),
    "compare/test_runs.py": (
        "test_runs_of_one_seed_differ_only_in_their_kha_settings",
        "test_an_interrupted_run_resumes",
    ),
    "compare/test_spikes.py": ("test_exact_numbers_of_a_flat_loss",),
    "compare/test_statistics.py": ("test_quantiles_of_students_t_match_printed_tables",),
    "conversion/test_to_hf.py": ("test_logits_equal_those_of_the_sharded_model",),
    "conversion/test_to_megatron.py": (
        "test_round_trips_keep_tensors_and_settings",
        "test_megatron_computes_the_same",
    ),
    "conversion/test_transforms.py": (
        "test_folded_models_are_stock_and_compute_the_same",
        "test_upcycled_models_keep_every_bit",
    ),
    "conversion/test_verify.py": ("test_mutations_are_noticed",),
    "data/test_prepare.py": ("test_text_comes_back_from_the_dataset", "test_verify_detects_damage"),
    "distributed/test_checkpoint_layouts.py": ("test_shared_matrices_are_stored_once",),
    "distributed/test_mutations.py": ("test_a_missing_rule_is_found",),
    "distributed/test_parallelism.py": (
        "test_equals_the_unsharded_run[tp2, dense]",
        "test_equals_the_unsharded_run[tp2 sp, dense, groups=1]",
        "test_equals_the_unsharded_run[tp2 sp dp2 ep2 etp2, moe]",
    ),
    "docs/test_commands.py": ("test_commands_parse",),
    "faults/test_conversion_faults.py": ("test_a_flipped_bit_is_detected",),
    "faults/test_damage.py": ("test_a_flipped_bit_is_detected_before_the_file_is_read",),
    "faults/test_recovery.py": ("test_the_tracker_file_is_repaired",),
    "heads/test_gate.py": ("test_activations_count_what_autograd_saves",),
    "heads/test_knocking.py": (
        "test_equals_the_oracle_with_every_gradient",
        "test_folding_equals_knocking",
        "test_flops_and_activations_match_torch",
        "test_starts_as_the_identity_bit_for_bit",
    ),
    "heads/test_routing.py": ("test_zero_router_with_all_heads_is_the_identity",),
    "hf/test_attention.py": (
        "test_output_and_gradients_equal_the_oracle",
        "test_linear_folds_into_a_stock_qwen3",
    ),
    "hf/test_experts.py": ("test_router_equals_megatrons",),
    "hf/test_initial_state.py": ("test_new_matrices_are_an_exact_no_op",),
    "hf/test_modelling_files.py": ("test_exported_code_gives_the_same_model",),
    "hf/test_saving.py": ("test_round_trip_is_exact",),
    "hf/test_tensor_parallel.py": ("test_outputs_and_gradients_equal_one_process",),
    "hf/test_uses.py": ("test_the_cache_holds_knocked_values_and_a_step_knocks_one_token",),
    "kernels/test_interpreted.py": ("test_equals_float64_with_every_gradient",),
    "mcore/test_attention.py": (
        "test_initial_value_is_identity_bit_for_bit",
        "test_random_start_is_the_same_on_all_ranks",
    ),
    "mcore/test_balancing.py": ("test_the_rms_form_is_sus_in_float64",),
    "mcore/test_collaborative.py": ("test_equals_the_oracle",),
    "mcore/test_family.py": (
        "test_gla_equals_the_oracle",
        "test_gta_equals_the_oracle",
        "test_mla_equals_the_oracle",
    ),
    "mcore/test_gates.py": (
        "test_gates_at_every_position_equal_the_oracle",
        "test_knocking_heads_without_gates_equal_the_oracle",
    ),
    "mcore/test_hybrid.py": ("test_losses_and_every_gradient_equal_the_gpt_form",),
    "mcore/test_moh.py": ("test_equals_the_oracle",),
    "mcore/test_named_specs.py": ("test_both_builders_make_what_kha_layer_spec_makes",),
    "mcore/test_patches.py": ("test_patch_applies_and_reverses_byte_for_byte",),
    "mcore/test_qkv.py": ("test_splits_as_megatron_does", "test_heads_stand_group_by_group"),
    "mcore/test_specs.py": ("test_transformer_engine_latent_attention_constructs",),
    "mcore/test_talking.py": ("test_equals_the_oracle",),
    "model/test_fields.py": ("test_table_agrees_with_megatrons_parser", "test_parse"),
    "model/test_rules.py": (
        "test_impossible_layouts_are_refused_with_the_nearest_sizes",
        "test_layouts_that_megatron_trains_are_accepted",
    ),
    "plan/test_counts.py": ("test_every_printed_count_is_ours", "test_the_papers_worked_example"),
    "recipes/test_logs.py": (
        "test_parse_step",
        "test_failure_is_that_of_the_first_rank_that_failed",
    ),
    "recipes/test_paper.py": ("test_counts_of_other_papers",),
    "recipes/test_slurm.py": ("test_dry_run_equals_golden_file",),
    "recipes/test_tables.py": ("test_every_row_of_each_table_is_there",),
    "test_fast.py": ("test_every_entry_names_a_test",),
    "test_config.py": ("test_round_trip", "test_the_papers_parameter_count"),
    "test_release.py": ("test_code_citations_and_changelog_agree",),
    "training/test_resume.py": (
        "test_resumed_training_is_bit_exact",
        "test_another_configuration_is_refused",
    ),
}
FAST = [f"tests/{file}::{name}" for file, names in _TESTS.items() for name in names]
UNKNOWN = pytest.StashKey[list[str]]()


def mark_fast(config, items):
    """Mark the fast tests, and store the entries of collected files that name no test."""
    found = {}
    for item in items:
        found.setdefault(item.nodeid, item)
        found.setdefault(item.nodeid.partition("[")[0], item)
    files = {item.nodeid.partition("::")[0] for item in items}
    config.stash[UNKNOWN] = []
    for entry in FAST:
        file = entry.partition("::")[0]
        if entry in found:
            found[entry].add_marker("fast")
        elif file in files or not (config.rootpath / file).exists():
            config.stash[UNKNOWN].append(entry)


def test_every_entry_names_a_test(request):
    assert request.config.stash[UNKNOWN] == []
