"""Each sentence of docs/guarantees.md has tests that fail if it is false: this table names them."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS: dict[str, list[str]] = {  # The first words of a sentence: functions of tests.
    "`listed == accepted + rejected`": ["test_every_input_is_accepted_or_in_the_ledger_by_path"],
    "Every listed input is": [
        "test_every_input_is_accepted_or_in_the_ledger_by_path",
        "test_the_ledger_of_a_build_that_failed_can_be_read",
    ],
    "A build whose sums": ["test_results_that_do_not_add_up_are_not_committed"],
    "A version becomes visible": [
        "test_of_eight_racing_processes_exactly_one_wins_each_of_a_hundred_rounds",
        "test_sigkill_of_the_whole_run_leaves_nothing_visible_and_a_rerun_completes",
        "test_what_has_returned_is_there_after_any_loss_of_power_and_not_if_any_sync_is_left_out",
    ],
    "Readers see": [
        "test_an_epoch_read_while_another_process_commits_is_of_exactly_one_version",
        "test_neither_a_killed_reader_nor_a_new_version_changes_what_a_version_gives",
    ],
    "Two writers": [
        "test_of_eight_racing_processes_exactly_one_wins_each_of_a_hundred_rounds",
        "test_another_content_under_the_number_is_a_conflict_that_names_both_runs",
    ],
    "A reader checks": ["test_no_damaged_byte_of_a_shard_is_silent"],
    "A flipped byte": [
        "test_no_flipped_bit_of_a_shard_goes_unseen",
        "test_a_flipped_bit_in_any_other_file_is_seen_too",
        "test_a_flipped_byte_is_named_by_verify_and_on_every_rank",
    ],
    "A full build": [
        "test_digests_are_equal_on_any_engine_master_and_partitioning",
        "test_what_is_appended_equals_one_build_of_all_sources",
        "test_any_series_of_changes_ends_with_the_content_of_a_full_build",
    ],
    "All executors": [
        "test_hosts_without_the_kernel_are_named_with_both_ways_to_continue",
        "test_other_versions_are_named_with_the_packages",
        "test_executors_without_the_drivers_kernel_are_named_before_any_work",
    ],
    "`gc` does not remove": [
        "test_no_order_of_requests_leaves_a_version_without_its_files",
        "test_without_any_one_rule_some_order_does",
        "test_what_gc_has_deleted_is_in_no_version",
        "test_gc_keeps_what_a_rollback_names",
    ],
    "[One case remains]": ["test_gc_whose_lease_has_lapsed_neither_commits_nor_deletes"],
    "`verify` names the file": [
        "test_a_missing_or_swapped_shard_is_named",
        "test_a_lost_shard_is_rebuilt_by_the_next_run",
    ],
    "Every sample of the train split": [
        "test_every_row_occurs_exactly_once",
        "test_an_epoch_has_each_sample_once_at_every_world_size",
        "test_a_resumed_loader_continues_with_the_very_next_batch",
    ],
    "**The same global batches**": [
        "test_global_batches_do_not_depend_on_the_world_size",
        "test_the_windows_of_a_rank_share_its_budget_and_up_to_eight_ranks_begin_alike",
        "test_a_loader_keeps_the_window_with_which_its_order_began",
        "test_a_training_keeps_its_window_on_other_ranks",
    ],
    "At the same world size": [
        "test_killed_and_resumed_equals_never_killed",
        "test_a_killed_process_resumes_exactly",
        "test_ranks_with_state_of_their_own_resume_exactly",
    ],
    "Exceptions are listed": ["test_every_strategy_declares_its_world_sizes"],
    "**Exact metrics**": [
        "test_metrics_equal_plain_numpy",
        "test_metrics_are_those_of_one_rank",
        "test_padding_adds_nothing_to_the_sums_of_the_parts",
    ],
    "If a rank dies": [
        "test_the_first_failing_rank_is_reported_and_nothing_is_left",
        "test_a_dead_rank_ends_the_job_with_every_launcher",
        "test_a_rank_with_an_open_connection_that_says_nothing_is_silent",
        "test_ranks_that_are_lost_are_done_without_and_the_losses_stay",
    ],
    "**No complete checkpoint": [
        "test_no_kill_costs_a_complete_checkpoint",
        "test_what_has_returned_is_there_after_any_loss_of_power_and_not_if_any_sync_is_left_out",
    ],
    "If two attempts": [
        "test_only_the_newest_attempt_publishes_and_only_once",
        "test_an_attempt_that_was_overtaken_publishes_nothing_more",
    ],
    "On one host": ["test_a_training_is_left_to_a_process_of_this_host_that_is_at_work_on_it"],
    "It is loaded back": [
        "test_an_export_that_answers_otherwise_than_was_recorded_is_none",
        "test_an_export_has_the_weights_and_metrics_that_the_training_ended_with",
    ],
    "The [gate]": ["test_the_decision_table", "test_exports_come_and_go_through_the_gate"],
    "Data is never executed": [
        "test_nothing_unpickles",
        "test_pickled_arrays_are_not_read",
        "test_its_metadata_is_never_unpickled",
    ],
    "Images and masks are decoded": [
        "test_what_breaks_a_limit_is_rejected_and_the_next_image_is_not",
        "test_a_mask_beyond_the_limits_of_decoding_rejects_its_image",
    ],
    "Ranks and driver": [
        "test_strangers_are_not_heard",
        "test_a_rank_accepts_no_driver_without_the_token",
        "test_training_under_attack_ends_well_and_listens_to_this_machine_only",
    ],
    "TensorFlow's own servers": [],  # Says what is not guaranteed.
    "Secrets are redacted": [
        "test_a_run_that_ends_early_leaves_no_secret",
        "test_secrets_are_in_no_record",
        "test_a_secret_setting_leaves_no_canary",
    ],
}


def test_each_sentence_has_tests_and_each_test_is_there():
    page = (ROOT / "docs/guarantees.md").read_text().split("## Not guaranteed")[0]
    bullets = [
        " ".join(bullet.split()) for bullet in re.findall(r"^- (.*?)(?=^- |^$|\Z)", page, re.DOTALL | re.MULTILINE)
    ]
    # A bold phrase with a full stop is the name of its bullet; sentences follow it.
    sentences = [s for b in bullets for s in re.split(r"(?<=\.) (?=[A-Z`\[])", re.sub(r"^\*\*[^*]*\.\*\* ", "", b))]
    assert [s for s in sentences if not s.startswith(tuple(TESTS))] == []
    assert [words for words in TESTS if not any(s.startswith(words) for s in sentences)] == []
    defined = {
        node.name
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    assert {name for names in TESTS.values() for name in names} - defined == set()
