"""Tests that scripts/nightly runs and .ci/run does not: each has a sibling that shows the same.

What is one of several forms of a test, and known where it stands, has the mark there instead.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

PATTERNS = (
    # Forms whose siblings run at every change, so that each strategy, way, code and option does.
    # On accelerators: forms that differ in how many tasks there are and how sums travel between
    # hosts.
    "strategies/test_main_contracts_on_accelerator.py::test_[ab]*-64]",
    "strategies/test_main_contracts_on_accelerator.py::test_[ab]*[[]sharded-3-2-100]",
    "strategies/test_main_contracts_on_accelerator.py::test_[ab]*[[]mesh-4-2-2]",
    "strategies/test_main_contracts_on_accelerator.py::test_[ab]*PairedStrategy-4]",
    "strategies/test_main_contracts_on_accelerator.py::test_[ab]*[[]tpu-2]",
    "strategies/test_main_contracts_on_accelerator.py::test_[ab]*[[]multi_worker_mirrored-2]",
    "strategies/test_main_contracts_on_accelerator.py::test_[ab]*[[]mirrored-2-ddp]",
    "strategies/test_main_contracts_on_accelerator.py::test_[ab]*[[]sharded-3-sockets-100]",
    "strategies/test_main_contracts_on_accelerator.py::test_numbers*[[]virtual-epochs-*",
    "strategies/test_main_contracts_on_accelerator.py::test_numbers*[[]uneven-*",
    "strategies/test_on_accelerator.py::test_numbers*PairedStrategy-4]",
    "strategies/test_on_accelerator.py::test_who_is_killed_*[[]sharded]",
    "strategies/test_contracts.py::test_batchnorm_*-64]",
    "strategies/test_contracts.py::test_batchnorm_*[[]sharded-3-2-100]",
    "strategies/test_contracts.py::test_batchnorm_*PairedStrategy-4]",
    "strategies/test_contracts.py::test_a_c*-64]",
    "strategies/test_contracts.py::test_a_c*[[]sharded-3-2-100]",
    "strategies/test_contracts.py::test_a_c*[[]mesh-4-2-2]",
    "strategies/test_contracts.py::test_a_c*PairedStrategy-4]",
    "strategies/test_changing_parameters.py::*pipeline-4-*",
    # Each placement over gloo once, each alone and in groups once; the chains of nestings train
    # under all of them.
    "strategies/test_nestings.py::test_numbers_*[[]sharded(zero=1, *process_group*",
    "strategies/test_nestings.py::test_numbers_*[[]sharded(zero=2, *process_group*",
    "strategies/test_nestings.py::test_numbers_*[[]mesh(model=2, zero=2, *process_group*",
    "strategies/test_nestings.py::test_numbers_*[[]pipeline(stages=2, *zero=[13], *process_group*",
    "strategies/test_nestings.py::test_numbers_*[[]pipeline(mesh=*process_group*",
    "strategies/test_nestings.py::test_groups_are_*inside=sharded(zero=2), *process_group*",
    "strategies/test_nestings.py::test_groups_are_*inside=sharded(zero=2, copies=2)*",
    "strategies/test_nestings.py::test_groups_are_*inside=mesh(model=2, zero=[12])*",
    "strategies/test_nestings.py::test_groups_are_*inside=pipeline(stages=2, *zero=1))*",
    "strategies/test_nestings.py::test_groups_are_*inside=mesh(mesh=*",
    "strategies/test_nestings.py::test_numbers_*[[]mesh(model=2, zero=[12])-*",
    "strategies/test_nestings.py::test_numbers_*[[]pipeline(stages=2, *zero=[12])-*",
    "strategies/test_nestings.py::test_groups_are_*inside=sharded(zero=[12]))-*",
    "strategies/test_nestings.py::test_groups_are_*inside=multi_worker_mirrored)-*",
    "strategies/test_nestings.py::test_groups_are_*[[]text18-sgd]",
    "strategies/test_nestings.py::test_groups_over_servers_are_*[[]text[6-9]-sgd]",
    "strategies/test_nestings.py::test_groups_over_servers_are_*[[]text10-sgd]",
    # Each code, delay and number of fragments goes on where it was in one form.
    "strategies/test_local_sgd.py::test_a_training_goes_on_where_it_was*{'compress': 'bf16'}]",
    "strategies/test_local_sgd.py::test_a_training_goes_on_where_it_was*{'compress': '4bit', *",
    "strategies/test_local_sgd.py::test_a_training_goes_on_where_it_was*[[]{'fragments': 2}]",
    "strategies/test_local_sgd.py::test_a_training_goes_on_where_it_was*'topk:0.1'}]",
    "strategies/test_local_sgd.py::test_a_training_goes_on_where_it_was*'every': ?1, 3?}]",
    "strategies/test_local_sgd.py::test_numbers_are_those_of_plain_torch[[]8-{'groups': ??0, 2*",
    "strategies/test_groups_inside.py::test_a_training_goes_on_where_it_was*topk*",
    "strategies/test_groups_inside.py::test_a_meeting_after_each_*[[]plain-{'inside': *",
    "strategies/test_groups_inside.py::test_numbers_are_those_of_groups_*zero=1*",
    "strategies/test_groups_inside.py::test_shards_without_elements[[]options1]",
    # Several rows of replicas share shards in memory as one row does, and meet by sockets.
    "strategies/test_sharded.py::test_losses_are_those_of_plain_torch[[]4-2-300]",
    # Each way with two codes and each code by two ways.
    "strategies/test_compression.py::test_replicas_stay_equal_*[[]bf16-[sl]*",
    "strategies/test_compression.py::test_replicas_stay_equal_*[[]8bit-[sd]*",
    "strategies/test_compression.py::test_replicas_stay_equal_*[[]4bit-[lp]*",
    "strategies/test_compression.py::test_replicas_stay_equal_*[[]topk-[ld]*",
    "strategies/test_compression.py::test_replicas_stay_equal_*[[]powersgd-[sp]*",
    "strategies/test_compressed_sums.py::test_what_is_sent_for_no_*[[]sockets-?[4p]*",
    "strategies/test_compressed_sums.py::test_what_is_sent_for_no_*[[]process group-?[tp]*",
    "strategies/test_compressed_sums.py::test_what_is_sent_for_no_*[[]zero=2-?[4t]*",
    "strategies/test_compressed_sums.py::test_what_is_sent_for_no_*[[]mesh-?[4p]*",
    "strategies/test_compressed_sums.py::test_what_is_sent_for_no_*[[]ddp-?[4t]*",
    "strategies/test_overlap.py::test_a_fit_has_the_bits_*[[]plain-sockets-3]",
    "strategies/test_overlap.py::test_a_fit_has_the_bits_*[[]accumulate-layers-4]",
    "strategies/test_overlap.py::test_a_fit_has_the_bits_*[[]deterministic-layers-4]",
    "strategies/test_overlap.py::test_a_fit_has_the_bits_*[[]bf16-sockets-3]",
    "strategies/test_overlap.py::test_what_is_faster_*[[]layers-4]",
    # Three replicas draw as two do, and stages on a mesh hold what others do.
    "strategies/test_random.py::test_every_way_to_draw_*('mirrored', 2, {})]",
    "strategies/test_meta.py::*[[]pipeline-4-2-2-2]",
    # What is trained has its values; a checkpoint between epochs, and of half an update, of two.
    "strategies/test_meta.py::test_it_trains_*[[]sharded-2-1]",
    "strategies/test_meta.py::test_it_trains_*[[]sharded-2-500]",
    "strategies/test_meta.py::test_it_trains_*[[]sharded-4-2]",
    "strategies/test_meta.py::test_it_trains_*[[]pipeline-4-2-2]",
    "strategies/test_meta.py::test_it_goes_on_*[[]waiting-sharded-2-[15]*",
    "strategies/test_meta.py::test_it_goes_on_*[[]epoch-sharded-2-[15]*",
    "strategies/test_meta.py::test_it_goes_on_*[[]waiting-mesh-2-2]",
    "strategies/test_meta.py::test_it_goes_on_*-pipeline-4-2-2-3]",
    # Tasks are killed in a mesh, and in a pipeline, at more spots in test_divided_recovery.
    "strategies/test_recovery.py::test_the_chief_and_a_worker_*[[]pipeline]",
    "strategies/test_recovery.py::test_the_chief_and_a_worker_*[[]mesh]",
    # A pipeline that is not cut, and a mesh, come back there.
    "strategies/test_divided_recovery.py::test_stages_that_are_cut_are_brought_back",
    # All go on from a backup in test_recovery, and two groups in test_group_recovery.
    "strategies/test_divided_recovery.py::test_all_who_have_a_part_*[[]mesh]",
    "strategies/test_group_recovery.py::test_all_who_speak_for_groups_are_lost_together",
    "strategies/test_group_recovery.py::test_the_others_go_on_without_a_group[[]1000]",
    "strategies/test_group_recovery.py::test_a_group_trains_on_with_fewer_tasks[[]False]",
    # Shards in memory are lost within updates there, too.
    "strategies/test_sharded_recovery.py::test_the_chief_and_a_worker_*[[]auto-3]",
    "strategies/test_sharded_recovery.py::test_shards_are_cut_anew_for_fewer_tasks[[]auto]",
    # The same starts of stages in interleaved stages, and on a mesh with another start.
    "pipeline/test_strategy.py::test_steps_are_*[[]regions-Adam-2--split-d-]",
    "pipeline/test_strategy.py::test_steps_are_*[[]regions-Adam-4--mesh-*",
    # Those of the model that an adapter is added to, of another encoder and decoder, of another
    # encoder, and of MobileNet.
    "zoo/test_zoo.py::test_numbers_are_those_of_plain_torch[[]transformer-pipeline]",
    "zoo/test_zoo.py::test_numbers_are_those_of_plain_torch[[]bert-pipeline]",
    "zoo/test_zoo.py::test_numbers_are_those_of_plain_torch[[]lora-pipeline]",
    "zoo/test_zoo.py::test_numbers_are_those_of_plain_torch[[]whisper-pipeline]",
    "zoo/test_zoo.py::test_numbers_are_those_of_plain_torch[[]efficientnet-mesh 2]",
    # Three replicas divide an update in uneven parts, and as two do.
    "strategies/test_sliced.py::test_every_kind_of_update_*-2]",
    # What the library calls of torch runs by itself in test_programs.
    "backend/test_libraries.py::test_the_numbers_of_gloo[[]accelerate]",
    "backend/test_programs.py::test_the_numbers_of_gloo[[]4-sharded.hsdp]",
    "backend/test_programs.py::test_the_numbers_of_gloo[[]4-model_parallel.tensor_and_data_parallel]",
    # Reductions and moves of every type go over two machines, too.
    "backend/test_operations.py::test_every_shape_and_layout[[]3-spartito on aab]",
    # Two settings with each strategy; a group of mirrored ones is that of several strategies.
    "strategies/test_reads.py::test_a_step_of_several_*[[]mirrored-[ad]*",
    "strategies/test_reads.py::test_a_step_of_several_*[[]sharded-[bc]*",
    "strategies/test_reads.py::test_a_step_of_several_*[[]mesh-[cd]*",
    "strategies/test_reads.py::test_no_parameters_pass_*[[]multi_worker_mirrored-2]",
    "strategies/test_reads.py::test_no_parameters_pass_*[[]tpu-2]",
    # Checkpoints between meetings, at one, and at the end: one of each kind.
    "strategies/test_decoupled.py::test_it_goes_on_exactly_from_a_checkpoint*(10,)-10]",
    "strategies/test_decoupled.py::test_it_goes_on_exactly_from_a_checkpoint*(6,)-6]",
    "strategies/test_decoupled.py::test_a_quorum_of_all_*[[]8-*",
    "strategies/test_groups_over_servers.py::test_it_goes_on_*[[]2-4-(4,)]",
    "strategies/test_groups_over_servers.py::test_an_epoch_that_is_gone_on_with_*[[]4]",
    "strategies/test_groups_over_servers.py::test_members_with_parts_*[[]sharded(zero=1)]",
    "strategies/test_groups_over_servers.py::test_figures_are_*[[]sharded(zero=2)-*",
    "strategies/test_compression.py::test_ddp_weighs_uneven_batches_exactly[[]1]",
    # Placements on machines, and sizes, of which others run.
    "collectives/test_groups.py::test_groups_of_a_mesh_compute_on_their_own[[]on aaab]",
    "collectives/test_hierarchical.py::test_any_placement_gives_the_same_results[[]aabca]",
    "collectives/test_results.py::test_all_collectives_agree[[]4]",
    "backend/test_operations.py::test_reductions_of_every_type[[]3-spartito on abc]",
    # At every spot, and more of them, by test_the_chief_and_a_worker_are_killed_at_every_spot.
    "strategies/test_sharded_recovery.py::test_tasks_are_killed_within_updates[[]sockets]",
    # ps/test_timetable.py looks as far ahead without tasks.
    "strategies/test_parameter_server_faults.py::test_a_chief_that_is_busy_*",
    # Who has a part of a model, or shares it, reads as tasks of meshes and pipelines do.
    "strategies/test_checkpoints.py::*[[]tests.strategies.paired:PairedStrategy-4]",
    "strategies/test_checkpoints.py::*[[]tests.strategies.paired:CutStrategy-4]",
    # Each kind of buffer, deterministic or not, with each strategy: in pairs.
    "strategies/test_buffers.py::test_what_is_alike_*[[]False-counter-*",
    "strategies/test_buffers.py::test_what_is_alike_*[[]True-norm-*",
    "strategies/test_buffers.py::test_what_is_alike_*[[]False-cumulative norm-*",
    "strategies/test_buffers.py::test_what_is_alike_*[[]True-cache-*",
    # Of what is exact no strategy tells anything, deterministic or not.
    "strategies/test_edits.py::test_what_is_exact_is_no_change[[]False-*",
    # What tasks draw at random goes on with other strategies of the same parts.
    "strategies/test_backups.py::test_what_is_drawn_*PairedStrategy-4]",
    "strategies/test_backups.py::test_what_is_drawn_*[[]tpu-2]",
    "strategies/test_backups.py::test_it_goes_on_*[[]deterministic-tpu-2]",
    "strategies/test_on_accelerator.py::test_numbers*[[]tpu-2]",
    # Each bound on staleness with one or two servers.
    "strategies/test_parameter_server_faults.py::test_a_killed_worker_costs_nothing[[]None-2]",
    "strategies/test_parameter_server_faults.py::test_a_killed_worker_costs_nothing[[]2-1]",
    "strategies/test_parameter_server_faults.py::test_a_killed_worker_costs_nothing[[]0-2]",
    "strategies/test_parameter_server_faults.py::test_a_killed_server_goes_on_*[[]2]",
    "strategies/test_parameter_server_roles.py::test_a_chief_of_its_own_*[[]2]",
    "strategies/test_parameter_server.py::test_no_push_is_staler_than_the_bound[[]2-1]",
    # Both optimizers learn alike: the other one runs at every change.
    "strategies/test_nestings.py::*adamw]",
    # Other codes of the same sums, of other strategies.
    "strategies/test_compressed_sums.py::* (slow)",
    "strategies/test_groups_inside.py::test_numbers_are_those_of_plain_torch* (slow)",
    "strategies/test_groups_inside.py::test_what_is_written_* (slow)",
    "strategies/test_groups_inside.py::test_a_training_goes_on_where_it_was*4bit* (slow)",
    "strategies/test_groups_inside.py::test_a_training_goes_on_where_it_was*sockets* (slow)",
    "strategies/test_groups_inside.py::test_numbers_are_those_of_groups*block_bytes* (slow)",
    # In the quick tests two kinds of operations are cut along two axes, and all along one.
    "mesh/test_rules.py::test_two_axes_cut_at_once* (slow)",
    "strategies/test_unfriendly_groups.py::*-tied-* (slow)",
    # Checkpoints of the quick tests go from each strategy to the next.
    "strategies/test_checkpoints.py::*-rest]",
    "strategies/test_meta.py::*fsdp*",
    # FSDP2 in rows of replicas, and what its shards do as those of our own engine.
    "strategies/test_sharded.py::test_losses_are_those_of_plain_torch[[]4-2-fsdp-1000]",
    "strategies/test_sharded.py::test_no_block_keeps_values_of_before*fsdp*",
    "strategies/test_sharded.py::test_optimizers_and_what_scripts_do_between_steps*fsdp*",
    "strategies/test_sharded.py::test_what_is_loaded_counts_after_a_change_in_place*fsdp*",
    # Programs of torch that differ in what rides on the same calls.
    "backend/test_programs.py::*.ddp_hook_*",
    "backend/test_programs.py::*.ddp_profiled]",
    "backend/test_programs.py::*.ddp_many_buckets]",
    "backend/test_programs.py::*.ddp_static_graph]",
    "backend/test_programs.py::*.evaluated]",
    "backend/test_programs.py::*.sampler]",
    "backend/test_operations.py::test_every_shape_and_layout[[]3-spartito on abc]",
    # A frozen rank is the same to all others.
    "collectives/test_hierarchical.py::test_a_frozen_rank_is_named_by_all* (slow)",
    "collectives/test_failures.py::test_a_frozen_rank_is_named_at_the_limit* (slow)",
    "collectives/test_machines.py::test_all_machines_name_the_one_that_is_frozen",
    "doctor/test_namespaces.py::test_training_by_names_that_mean_the_loopback[[]1]",
    # A strategy and a launcher that were added train in test_added_strategy and test_extending.
    "launch/test_extending.py::test_the_packages_of_the_page",
    # One fault of each kind, one kind of job of each tool.
    "chaos/test_chaos_integration.py::test_a_worker_of_groups_over_servers[[]kill]",
    "launch/test_kubernetes_integration.py::test_a_synchronous_job[[]job-none]",
    "chaos/test_chaos_integration.py::test_who_lives_goes_on",
    "launch/test_clouds_integration.py::test_digits_on_two_nodes*[[]dstack]",
    "launch/test_clouds_integration.py::test_digits_with_servers*[[]sky]",
    "launch/test_cold_start_integration.py::test_the_image_that_users_build*",
    "launch/test_engine.py::test_groups_meet_in_containers*",
    "launch/test_engine.py::test_either_composer_runs_a_job[[]docker compose]",
    "launch/test_engine_faults_asynchronous.py::test_a_worker_crashes_then_is_killed_for_good",
    "launch/test_engine_faults_synchronous.py::test_paused_then_cut_and_rejoined",
    "launch/test_engine_refusals.py::test_a_task_or_its_child*[[]sys*",
    "launch/test_firewall.py::test_a_range_comes_before_the_declared_port",
    "launch/test_firewall.py::test_only_the_leaders_of_machines_need_a_way",
    "launch/test_firewall.py::test_process_groups_need_what_the_system_draws",
    "launch/test_firewall.py::test_servers_need_no_way_to_the_chief",
    "launch/test_kubernetes_integration.py::test_a_pod_that_fails_for_good_ends_the_job[[]*-4]",
    "launch/test_kubernetes_integration.py::test_a_server_that_waits_when_the_work_is_done_is_ended",
    "launch/test_kubernetes_integration.py::test_a_synchronous_job[[]jobset-deleted]",
    "launch/test_kubernetes_integration.py::test_a_synchronous_job[[]trainjob-evicted]",
    "launch/test_kubernetes_integration.py::test_others_go_on_without_a_pod_that_is_replaced",
    "launch/test_kubernetes_integration.py::test_parameter_servers_of_which_*",
    "launch/test_members.py::test_a_member_that_stands_still*[[]mesh*",
    "launch/test_members.py::test_with_a_chief_of_its_own*[[]mirrored]",
    "launch/test_members.py::test_with_a_chief_of_its_own*[[]sharded*",
    "launch/test_ray.py::test_a_lost_node_ends_the_job_and_names_its_task",
    "launch/test_ray.py::test_tasks_end_with_their_launcher[[]9]",
    "launch/test_ray.py::test_the_example_of_the_page_runs",
    "launch/test_slurm_again_integration.py::test_a_job_that_somebody_ends_does_not_come_again",
    "launch/test_slurm_again_integration.py::test_a_job_whose_node_is_lost_comes_again",
    "launch/test_slurm_again_integration.py::test_a_run_of_an_array_comes_again_alone",
    "launch/test_slurm_again_integration.py::test_no_job_comes_again_that_may_not",
    "launch/test_slurm_again_integration.py::test_runs_of_an_array_*",
    "launch/test_slurm_again_integration.py::test_workers_after_the_servers_*",
    "launch/test_slurm_integration.py::test_launchers_inside_of_a_job*[[]srun of run]",
    "launch/test_slurm_integration.py::test_launchers_inside_of_a_job*[[]mpirun]",
    # The commands of that tutorial have tests of their own; of the others one form runs at every
    # change.
    "test_docs.py::test_a_page_works_step_by_step[[]docs/tutorials/choose-a-strategy.md]",
    "mutation/test_mutants.py::test_a_mutant_acts_in_a_copy_and_in_the_children_of_its_tests",
    "test_system.py::test_jobs_elsewhere[[]gloo]",
    "test_system.py::test_jobs_elsewhere[[]sharded]",
    "launch/test_ssh_integration.py::test_digits_are_learned[[]ps]",
    "launch/test_slurm_again_integration.py::test_servers_on_nodes_of_their_own_train",
    "training/test_killed_jobs_integration.py::test_it_goes_on_after_all_were_killed[[]parameter*",
    "strategies/test_parameter_server_programs.py::test_the_launcher_starts_a_killed_server_again",
    "test_jobs_integration.py::test_two_processes_give_the_numbers_of_one[[]two_nodes]",
    "test_jobs_integration.py::test_two_processes_give_the_numbers_of_one[[]chief_and_worker]",
    "launch/test_fork_server.py::test_ends_are_those_of_python[[]sys.exit(3)*",
    "launch/test_fork_server.py::test_ends_are_those_of_python[[]*11)*",
    "launch/test_fork_server.py::test_ends_are_those_of_python[[]raise Key*",
    "launch/test_fork_server.py::test_ends_are_those_of_python[[]*, 9)*",
    "launch/test_fork_server.py::test_a_forked_task_finds_what_its_own_python_gives[[]module]",
    "launch/test_fork_server.py::test_a_forked_task_finds_what_its_own_python_gives[[]in a folder]",
    "launch/test_fork_server.py::test_a_forked_task_finds_what_its_own_python_gives[[]script]",
    "launch/test_slurm_integration.py::test_launchers_inside_of_a_job*[[]torchrun]",
    "launch/test_clouds_integration.py::test_a_script_comes_along_with_its_folder[[]dstack]",
    "strategies/test_sharded_recovery.py::test_the_chief_and_a_worker_*[[]auto-1]",
    "strategies/test_sharded_recovery.py::test_the_chief_and_a_worker_*[[]auto-2]",
    "strategies/test_sharded_recovery.py::test_the_chief_and_a_worker_*[[]sockets-1]",
    "strategies/test_sharded_recovery.py::test_the_chief_and_a_worker_*[[]sockets-3]",
    "strategies/test_group_recovery.py::test_a_meeting_that_some_have_held_is_held_by_all[[]2]",
    "strategies/test_group_recovery.py::test_another_task_is_lost_*[[]6]",
    "strategies/test_group_recovery.py::test_a_group_gets_back_who_is_lost[[]metrics0]",
    "strategies/test_divided_recovery.py::test_another_task_is_lost_*[[]strategy1]",
    "strategies/test_divided_recovery.py::test_a_task_is_lost_before_*[[]interleaved]",
    "pipeline/test_strategy.py::test_steps_are_those_of_plain_torch[[]gpt-SGD-8*",
    "pipeline/test_strategy.py::test_steps_are_those_of_plain_torch[[]cats-Adam-4--micro*2-*",
    # What begins at the same modules runs with activations that are computed again.
    "pipeline/test_strategy.py::test_steps_are_those_of_plain_torch[[]gpt-SGD-4--split*",
    "strategies/test_divided_recovery.py::test_all_who_have_a_part_*[[]pipeline]",
    "strategies/test_divided_recovery.py::test_a_task_is_killed_wherever_it_is[[]sockets-mesh]",
    "strategies/test_divided_recovery.py::test_a_task_is_killed_wherever_it_is[[]auto-pipeline]",
    "strategies/test_divided_recovery.py::test_an_update_that_some_have_made_*[[]mesh]",
    "strategies/test_divided_recovery.py::test_another_task_is_lost_*[[]strategy2]",
    "strategies/test_failing_chief.py::test_others_stay_while_it_saves_*[[]groups*",
    # Over gloo the numbers of each placement are shown alone; these are the same in groups.
    "strategies/test_nestings.py::test_groups_are_*inside=mesh(model=2), *process_group*",
    "strategies/test_nestings.py::test_groups_are_*inside=multi_worker_mirrored, *process_group*",
    # Columns of the page that do on one machine what their neighbours do.
    "zoo/test_zoo.py::test_numbers_are_those_of_plain_torch*-multi_worker_mirrored]",
    "zoo/test_zoo.py::test_numbers_are_those_of_plain_torch*-sharded 1]",
    "zoo/test_zoo.py::test_numbers_are_those_of_plain_torch*-sharded 2]",
    # One way for each tool, and one fault: what they do with a job has tests without the tool.
    "launch/test_podman.py::test_podman_runs_digits_on_two_workers",
    "launch/test_slurm_again_integration.py::test_a_job_that_is_told_to_end_twice*",
    "launch/test_slurm_integration.py::test_servers_and_an_evaluator_have_tasks_of_their_own",
    "launch/test_clouds_integration.py::test_digits_with_servers_*[[]dstack]",
    "launch/test_ssh_integration.py::test_the_machine_of_rank_0_is_lost_*",
    "launch/test_members.py::test_a_member_that_stands_still*[[]]",
    "launch/test_members.py::test_a_group_is_started_again_as_one*",
    "launch/test_tutorials.py::test_two_machines",
    "backend/test_machines.py::test_four_ranks_on_two_machines_*",
    "backend/test_libraries.py::test_the_numbers_of_gloo[[]lightning]",
    "comparison/test_containers.py::test_one_strategy_fails_*",
    "test_jobs_integration.py::test_photos_of_cats_and_dogs",
    "test_system.py::test_a_comparison_elsewhere",
    # Numbers of a chip are those of the other tests there, with several of them, or at random.
    "tpu/test_tpu_integration.py::test_several_processes*",
    "tpu/test_tpu_integration.py::test_random_numbers",
    # The checks of a GPU, of which each runs alone too; the largest model of four.
    "test_gpu_checks.py::test_strategies_agree_with_one_device",
    "test_gpu_checks.py::test_both_sides_of_a_race*",
    "pipeline/test_strategy.py::test_messages_between_devices_are_told_apart[[]gpt*",
    "pipeline/test_strategy.py::test_steps_are_those_of_plain_torch[[]gpt-again-SGD*",
    "pipeline/test_endings.py::test_the_cause_of_an_end_is_read_last[[]auto*",
    # The tutorials that are typed line by line: the longest one runs at every change.
    "test_docs.py::test_a_page_works_step_by_step[[]docs/tutorials/first-training.md]",
    "test_docs.py::test_a_page_works_step_by_step[[]docs/tutorials/custom-loop.md]",
    # One script from another library runs at every change, and the tutorial with ssh.
    "launch/test_tutorials.py::test_slurm",
    "test_docs.py::test_a_page_works_step_by_step[[]docs/guides/coming-from/[!k]*",
    "test_docs.py::test_a_script_from_elsewhere_runs*",
    # Further schedules and messages of the same kinds; of all programs that start a job, torchrun
    # alone imports torch three times (its variables are set by hand elsewhere).
    "ps/test_simulation.py::test_jobs_whose_values_are_on_two_servers*[[]40-260]",
    "ps/test_client.py::test_thousands_of_groups_*[[]memory]",
    "test_jobs_integration.py::test_two_processes_give_the_numbers_of_one[[]torchrun]",
    # Steps of one's own have tests of their numbers; the first example runs at every change.
    "test_jobs_integration.py::test_the_example_with_two_optimizers",
    # One reason for which there is no shared memory; one way to ask for torch's compiler.
    "launch/test_streams.py::test_a_job_on_a_machine_without_shared_memory[[]no*",
    "launch/test_streams.py::test_a_job_on_a_machine_without_shared_memory[[]read*",
    "test_late_compiler.py::test_who_asks_for_it_gets_torchs_own[[]decorator]",
    # As on a system that is not Linux: other forms of jobs, and what test_central_storage shows.
    "test_system.py::test_jobs_elsewhere[[]one_device]",
    "test_system.py::test_one_copy_needs_memory_that_all_have",
    "test_system.py::test_memory_that_cannot_be_written[[]False-False]",
    # One form for each direction, and for each signal and command that it comes to.
    "doctor/test_namespaces.py::test_a_line_that_drops_large_packets[[]there-]",
    "doctor/test_namespaces.py::test_a_line_that_drops_large_packets[[]back-a*",
    "doctor/test_namespaces.py::test_a_line_that_drops_large_packets[[]both-a*",
    "launch/test_engine_stand_in.py::test_an_interrupt_amid_the_removal_*[[]command0-2]",
    "launch/test_engine_stand_in.py::test_an_interrupt_amid_the_removal_*[[]command1-1]",
    "launch/test_engine_stand_in.py::test_an_interrupt_amid_the_removal_*[[]command1-15]",
    # A way that is closed is found where doctors are started by hand; tasks meet in a directory
    # without Slurm.
    "launch/test_ssh_integration.py::test_the_doctor_finds_a_way_that_is_closed",
    "launch/test_slurm_integration.py::test_jobs_submitted_one_by_one_*",
    # What a killed worker does to a job, and how it goes on with the same numbers, is shown without
    # this tool; which exit codes come again under Slurm is shown without Slurm.
    "chaos/test_chaos_integration.py::test_a_worker_that_is_killed",
    "launch/test_slurm_again_integration.py::test_a_mistake_of_one_task_ends_the_job_as_one",
    # The same ports, ways and endings, once more.
    "launch/test_local.py::test_a_jobs_ports_are_taken_before_its_tasks_listen[[]1]",
    "launch/test_firewall.py::test_sockets_at_a_closed_port",
    "launch/test_ssh_integration.py::test_a_signal_ends_all_machines[[]near,node2-2-130]",
    "launch/test_added_strategy.py::test_compare",
    "doctor/test_examination.py::test_a_port_that_another_program_has[[]HTTP*",
    # What containers do when tasks are lost has one form for each kind of job; waiting for the end
    # and what an interrupted ``up`` leaves have tests without an engine.
    "launch/test_engine_faults_asynchronous.py::test_a_worker_is_paused_then_cut_*",
    "launch/test_engine_faults_asynchronous.py::test_down_asks_all_tasks_at_once",
    "launch/test_engine.py::test_the_end_of_a_detached_job_can_be_waited_for",
    "launch/test_engine_refusals.py::test_down_removes_what_an_up_has_left_*",
    "comparison/test_containers.py::test_ctrl_c_removes_the_containers_*",
    # That check is a sum of torch's own, in two processes.
    "test_gpu_checks.py::test_a_check_holds_on_the_cpu[[]nccl]",
    # Who interrupts a run of tests has its workers ended in the same way.
    "test_workers.py::test_the_first_failure_can_be_the_last",
    # Of the same device its numbers in fp64 are compared, also of batches that are smaller and not
    # filled; how often it compiles costs time and changes none.
    "tpu/test_tpu_integration.py::test_bf16",
    "tpu/test_tpu_integration.py::test_more_batches_are_no_more_programs",
    "tpu/test_tpu_integration.py::test_a_smaller_batch_is_compiled_once_more_*",
    # Every schedule is told by a chief that comes by late, two of them by one that comes at once.
    "ps/test_timetable.py::test_a_server_that_hears_seldom_has_*[[]0-[!s]*",
    # Another job of each tool: it starts tasks, learns how they end and has their files in others.
    "launch/test_cold_start_integration.py::test_train_with_servers",
    "launch/test_kubernetes_integration.py::test_parameter_servers",
    "launch/test_clouds_integration.py::test_digits_on_two_nodes*[[]sky]",
    "launch/test_ray.py::test_a_script_trains_as_under_spartito_run",
    # Data and checkpoints in a store are read and written alone; a job goes on with more workers.
    "storage/test_stores.py::test_a_training_from_and_in_a_store_goes_on_*",
)
"""Names as in ``tests/...``; those that end in " (slow)" mean tests with that mark alone."""


def pattern_of(name: str, is_slow: bool) -> str | None:
    """The first pattern that a test fits, which runs at night only then.

    Args:
        name: As pytest has it, without the folder of the tests.
        is_slow: Whether it is marked so.
    """
    return next((pattern for pattern in PATTERNS if fits(name, is_slow, pattern)), None)


def fits(name: str, is_slow: bool, pattern: str) -> bool:
    """Whether a test is one of a pattern's.

    Args:
        name: As above.
        is_slow: As above.
        pattern: One of `PATTERNS`.
    """
    plain = pattern.removesuffix(" (slow)")
    return (is_slow or plain == pattern) and fnmatchcase(name, plain)
