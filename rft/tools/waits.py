"""Every wait of the parts of a run for each other: where it is in the code, for whom, how long, and
what then. `docs/architecture.md` shows it.

In: the table below, by hand. Out: its rows. Invariant: a test finds the waits in all sources of
rft, and fails where one is not declared here, or one that is declared is gone. What is said of
a limit names the constant or key that holds it; "none" means that only the end of somebody ends it,
and then that end has a deadline of its own, which the row names. A bare `await` of a future that
the same process sets is none of these.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Declared:
    file: str  # below rft/
    function: str
    whom: str
    limit: str
    then: str


# FILE: FUNCTION | for whom | how long | what then
TABLE = """
agents/agent_process.py
_process | an agent's program | none: the workflow's `timeout` cancels it | killed with its \
family
agents/endpoint/registry.py
Registry.end | groups that are being stored | the caller's: `END_S` | said which may not be
Registry.expire | sessions and groups that nobody uses | `AGAIN_S`, again and again | ended after \
`timeout`, and stored
agents/endpoint/server.py
OpenAIEndpoint._stream | the answer of an engine | none: `max_timeout` of the request; a comment \
every `KEEP_ALIVE_S` | the stream says the error
_json | the body of a request | `BODY_S` | answered 408
agents/workflow.py
AgentWorkflow._run | an agent | `timeout` of its workflow | the task fails, and is tried again
AgentWorkflow._reward | a posted reward | `reward_timeout` | the task fails, and is tried again
buffer/calls.py
answered | a buffer that comes back | none: its callers' | asked again every `AGAIN_S`
CallBatcher._send | other groups of the same moment | `GATHER_S` | sent without them
Waiters.wait | what a call of the buffer waits for | the caller's | False: the caller says so
Waiters.watch | the buffer's end | none: it is the wait for its failure | the supervisor hears of \
it
buffer/experience_buffer.py
ExperienceBuffer.admit_some | a slot | `max_read_timeout` | the explorer is told which step holds \
it up
ExperienceBuffer.look | the groups of the next step | `max_read_timeout` | there is nothing to see
ExperienceBuffer.readmit | a version that an unfinished group may use | `max_read_timeout` | the \
explorer is told
ExperienceBuffer.cuts | groups that a step goes on without | `max_read_timeout` | asked again
ExperienceBuffer._await_groups | groups of a step, and answers of those that are cut | \
`max_read_timeout` each | the trainer is told which are missing
buffer/sql_buffer.py
SqlBuffer._do | a database that passes errors | `RETRY_S`, naps of up to `LONGEST_NAP_S` | the \
call fails
SqlBuffer._until | another process's change | `WATCH_S`, again until `max_read_timeout` | the \
caller is told
SqlBuffer._beats | the next sign of life | a quarter of `lease_s` | it looks who is silent
buffer/sql_events.py
Events.turn | a connection, locks, a statement | `CONNECT_S`, `LOCK_S`, `STATEMENT_S`, `CALL_S` \
| an error that passes: made again
Events.looking | the same | the same: `CONNECT_S`, `STATEMENT_S`, `CALL_S` | made again
buffer/sql_patience.py
patient.Patient.wait | a server's answer | `CALL_S` | the connection is closed; made again
buffer/sql_stands.py
Stands.drop | the same | the same | made again
Stands.read | the same | the same | made again
buffer/sql_tables.py
_write_ahead | another process that opens a new file | `LOCK_WAIT_S` | the start fails
_absent | a server's answer | `CALL_S` | the tool ends
create | one that opens a new file, or PostgreSQL's lock | `LOCK_WAIT_S`, `LOCK_S` | the start fails
checkpoint/agent.py
Agent.run | what its rank says; then its watcher | none: the rank's end; then `deadline_s` | it \
ends itself
Agent._beat | the next sign of life | `BEAT_S` | -
Agent._watch | a save; then exports | `look_s` where one is open; an export that is silent for \
`deadline_s` is killed | committed, or set aside
Agent._follow | an export's next word | `deadline_s` | killed with its family
checkpoint/asking.py
_awaited | a save that somebody asked for | `--timeout`, looked for every `LOOK_S`; `GONE_S` after \
the run's end | exit code 1
checkpoint/fence.py
await_agents | agents of the attempt before | the caller's: `agent_deadline_s` | the start goes \
on, and their saves count for nothing
checkpoint/link.py
Link.close | the agent finishes what it has | the caller's: what is left of the grace | it goes \
on by itself
Link._listen | the end of an agent whose connection has ended | none: `SILENT_S` of its watchdog \
| killed, another one is started
Link._try_to_start | room for another process | `LOOK_S`, `FRUITLESS` times | saves fail, \
training goes on
Link._watchdog | the agent's next word | `SILENT_S`, `START_S` where it is new, looked at every \
`LOOK_S` | killed, another one is started
checkpoint/manager.py
CheckpointManager.wait | the saves of a step | twice `agent_deadline_s` | the rank is told
CheckpointManager.wait_exports | an export's next word | twice `agent_deadline_s` | the rank is \
told
checkpoint/memory.py
Resting._serve | a rank that takes its states over | `deadline_s`; `UNOWNED_S` without anybody \
who may start one | the agent ends
may_come | whether torchrun has ended | 0: looks | nobody comes
checkpoint/neighbours.py
_why_unseen | what rank 0 has written, to be seen here | `SEEN_S`, at most the caller's patience | \
the start is refused
checkpoint/peers.py
PeerLine.wait | what the other agent says next | none: the end of its connection; `IDLE_S` within \
a message | the caller comes again
PeerLine.receive_into | bytes of a part | `IDLE_S` without one | the part is sent again
dial | an agent of another node | `HELLO_S` | OSError: the caller asks the next, or again
listen.accept | agents and ranks that call | none: a thread of its own; who proves nothing goes \
after `HELLO_S` | -
checkpoint/rank_files.py
patiently | storage that cannot be reached | the caller's: `patience_s` | StorageUnreachable
checkpoint/remote.py
RemoteAgent.asked | an agent that still writes, until it rests | `AT_WORK_S` | its memory is not \
read
checkpoint/replicas.py
Replicas._watch | the next look at slots that are wanted | `LOOK_S` | -
Replicas._send_all | the next node's agent, which is not there | `AGAIN_S`, again and again | no \
state is whole; what is wanted is given up after `STALLED_S`
Replicas._send_to | a state to send | `LOOK_S`, again and again | -
Replicas._hear_first | the first agent's word | `AGAIN_S`, again and again | no state is whole; \
what is wanted is given up after `HELD_S`
Replicas._serve | what other agents have | none: the end of their connection | -
Replicas._take_all | the next part of another node's agent | none: the end of its connection | -
Replicas._answer_all | a rank that came back | none: the end of its connection | -
Replicas._listen_before | an earlier agent of this node to end | `AGAIN_S`, again and again | -
Replicas._serve_before | whoever asks for an earlier agent | none: the end of its connection | -
checkpoint/stager.py
SlotPool.lease | a slot of staging memory | `staging_patience_s` | that save is given up
SlotPool.is_free | a slot that was released just now | `RELEASE_S` | False: the caller's choice
Stager._serve | the next save | none: a thread of its own | -
Stager._stage | the thread that reads the next step's rows | `LATE_S`, or somebody waits for the \
copies | they are made
Stager._await | the copy from the device | twice `deadline_s` | the rank fails: its device hangs
checkpoint/uploads.py
Upload._again | a store that is away, beyond the client library's own tries | `PATIENCE_S`, asked \
again every `AGAIN_S` | the save fails, what is up is ended
checkpoint/wire.py
Outbox._run | the next word to the agent | none: a thread of its own | -
checkpoint/writer.py
Pacer.__call__ | the rate that is allowed | the bytes by `rate` | -
Gate._wait | another writer | `patience_s` | it writes all the same, and says so
extras/pipeline/data_juicer.py
JuicerClient._call | an answer of the service | `timeout_s` | JuicerError: the operator failed
JuicerServer.start | a service that begins | `start_timeout` | JuicerError, its log's end in it
JuicerServer._start_at | the same | none: `start_timeout` of its caller | -
free_port | its own connection | `ANSWER_S` | the start fails
extras/pipeline/task_operators.py
LLMDifficulty.process | its own requests | 0: they have ended, each within `request_timeout` | -
LLMDifficulty._score | a busy server | what it asks for, `MOST_PAUSE_S` at most | asked again
extras/pipeline/worker_process.py
OperatorProcess.close | operators close | `CLOSE_S` | killed
OperatorProcess._ask | an operator's answer | `timeout_s`; its start `START_S` | killed; the \
group fails
extras/sweep/job.py
attempt | a trial's end | none: it is the wait for it | the next trial
end | a trial that was told to end | its own `shutdown_grace_s` | it kills what is left itself
ended_with.watch | the launcher's end | none: it is the wait for its death | the trial is told to \
end
ended_with | that watcher | none: it is woken | -
extras/sweep/trial_records.py
_holder_ended | whoever runs the trial | the caller's | the sweep says who has it
extras/tinker/remote_policy.py
RemotePolicy.forget | a save of before | 0: only those that are there are forgotten | -
_hand_on | a save | 0: it has ended | -
extras/tinker/sampler.py
SamplerEngine.stage | the service | `sync_timeout` | the engine failed the round
SamplerEngine.watch | its own end | none: it is the wait for its death | -
extras/tinker/saves.py
RemoteCheckpoints._commit | paths of a save | 0: they are there | -
PathOrigin._tell | the path of a save | 0: it is there | -
extras/tinker/service.py
Service.answer | the service | `timeout` of model.tinker | ServiceFailed: the rank fails
Service.close | the service | `CLOSE_S` | said, and left
ground/device.py
capability | the driver's tool | `TOOL_S` | the start says so
ground/durable.py
lock | another holder | the caller's: `FETCH_S` of a download, `BEFORE_S` of a sidecar, else 0 | \
the caller says who
take | another holder | 0: it does not wait | -
ground/node_file.py
NodeFile.take | another reader of the node that reads the same part | none: the end of its read, \
or its own | read here
ground/process.py
messages | the next part of a message | the socket's, none without one: the other end's death | -
one_message.exactly | a whole message | the caller's | BrokenFrame, or TimeoutError
accepted | a connection | none: a thread of its own | -
await_end | a process's end | the caller's | False
end_descendants | processes end | the caller's, then `KILL_WAIT_S` | killed; said if that does \
not help
end_family | killed processes | `KILL_WAIT_S` | said
_await | killed processes | `KILL_WAIT_S` | said
Child.reap | killed processes | `CLOSE_TIMEOUT_S` | the caller is told
guard | a foreign program's end | none: whoever started it kills it | what it started is killed
guard.end | what the program started | 0, then `KILL_WAIT_S` | killed
megatron/cpu_port.py
gather_within | ranks with the same weights | `collective_timeout` | the rank fails
reduce_within | ranks with the same weights | `collective_timeout` | the rank fails
megatron/mesh.py
Mesh.gather | all ranks | `collective_timeout` | the rank fails, its peers named
Mesh._receive_part | rank 0 | `collective_timeout` | the rank fails
Mesh.scatter_parts | ranks that hand on | `collective_timeout` | the rank fails
monitor/logs.py
_keep_small | the next look at a log | `LOOK_S` | it looks
ask_stacks_of_siblings | stacks of other processes | `STACKS_S` | without them
monitor/mlflow.py
Server._ask | the tracking server | `REPLY_S` | counted as left out
MLflow.close | its thread | `CLOSE_S` | left behind, said
MLflow._send | the next order | none: a thread of its own | -
preflight/inputs_data.py
_own_service | a service's `--check` | six times `ANSWER_S` | the start is refused
rollout/adapter_serving.py
AdapterServing._room | requests of an old adapter | `sync_timeout` | the engine fails the round
rollout/answers.py
AnswerKeeper.follow | the next look at answers | `LOOK_S` | it looks
rollout/engine.py
RolloutEngine._watch_processes.sleep_until_one_ends | vLLM's processes end | none: it is the wait \
for their death | the engine failed; stopped: `STOPPED_S`
await_exit_code | an ended process's exit code | a second | without it
rollout/engine_weights.py
EngineWeights._let_end | requests near their end | `MOST_S` | their caches are computed again
Turns.one_ends | one more request ends | the caller's limit | -
Turns.request | the engine wakes | none: the task's `max_timeout` | the task is tried again
Turns.sleep | requests under way | a share of `sync_timeout` | frozen as they are
rollout/environments.py
Environments.episode | a place among the episodes | none: the task's `max_timeout` | the task \
fails
Episode._ask | an environment's step | `step_timeout` | its process is killed
Episode.drive | an environment's whole episode | what is left of the task | its process is killed
Host._asked | an environment's answer | the caller's limit | its process is killed
Host.start | an environment's setup | `start_timeout` | its process is killed
asked_once | an environment's `--check` or rows | `start_timeout` | the start is refused
rollout/explorer.py
Explorer._ask | the buffer | `STORE_S`; for slots `max_read_timeout` and `READ_MARGIN_S` | the \
explorer failed
Explorer._launch | a free runner | none: tasks end within `max_timeout` | -
Explorer._make | room in the pipeline | none: groups in it have limits of their own | -
Explorer._next | a selector's lessons | none: tasks end within `max_timeout` | -
Explorer.base_url | its own start | none: whoever asks has `REPLY_S` | the run ends
Explorer.evaluate | its own start | none: whoever asks has `RETURN_S` | rank 0 fails
Explorer.explore | its own start | none: whoever asks has `RETURN_S` | rank 0 fails
Explorer.finished | its own start | none: its supervisor has `START_S` for it | the run ends
Explorer._readmit | a held explorer goes on | none: until its trainer says so | the trainer's end
Explorer.opened | all parts serve | none: whoever asks has `START_S` | rank 0 fails
Explorer.sample | it is prepared; engines | none: `START_S` of who asks | -
Explorer._report | the next report | `runner_state_report_interval` | it reports
rollout/pool.py
EnginePool._ask | an engine's answer | none: the task's `max_timeout` | the engine is told to \
stop
EnginePool._look | an engine's clock | `LOOK_S` | nothing is told of it
EnginePool._look_at | an engine's finished samples | `LOOK_S` | they come with the others
EnginePool.abort | an engine | none: the task's `max_timeout` | -
EnginePool.drain | its requests | none: `drain_s` of who asks | they run again elsewhere
EnginePool.follow | a change of the members | none: until the synchronizer ends | the run ends
EnginePool._complete | an engine that serves | none: the task's `max_timeout` | the task fails
ResizableSemaphore.__aenter__ | a place | none: tasks end within `max_timeout` | -
rollout/reward_pool.py
RewardPool._attend | the next look at idle workers | `ATTEND_S` | a dead one is replaced
RewardPool._ask | a worker loads | `_load_timeout_s` | killed
RewardPool._heard | a reward | `timeout_s` in which its worker is not stopped; stopped: \
`STOPPED_S` | killed; an outcome of its own; stopped: done again, once
RewardPool._taken | a free worker | none: others' rewards end within `timeout_s` | -
RewardPool.close | groups under way | none: their workers are killed | -
rollout/rewards/judge.py
_asked | a judging model, and between two tries | the judge's `seconds` | the reward is an error
rollout/runner.py
Runner.run | one task | `max_timeout`, or the limit of its step | cancelled, tried again
end | a cancelled workflow | `CANCEL_S` | left alone, without engines
rollout/sandbox/__init__.py
_ended | a cell's program | its `seconds` and `LATE_S` | killed, scored as a timeout
_end | a killed cell | `LATE_S` twice | killed
_tried | the first cell | twice `TRIAL_S` | the start fails
rollout/sandbox/cell.py
main | its watcher's end | none: the watcher ends the program after its `seconds` | -
MemoryGroup.remove | its last process | a second | left to the kernel
begin | a control group of its own | 0: it writes its number there | -
wait | the program | its `seconds` | killed
end_children | killed processes | the kernel | -
rollout/worker_channel.py
WorkerChannel.stage | the engine's workers | `sync_timeout` | the engine failed the round
within_reach | the object store | `sync_timeout` | the engine failed the round
WorkerChannel._is_worker | the word of who connects | `HELLO_S` | left
rollout/workflows/environment.py
EnvironmentWorkflow.episode | an episode | `timeout` of its workflow | the task fails, and is \
tried again
rollout/workflows/judges.py
JudgedSingleTurn.said | an engine's answer | none: the task's `max_timeout` | the task is tried \
again
rollout/workflows/threads.py
Waiting.wait | a coroutine of the explorer's loop | none: cancelled when the task is over, at \
`max_timeout` | Abandoned
_WaitingContext.__getattr__ | the same | none: as above, `max_timeout` | Abandoned
run/actors.py
Actors._begin | explorer opens | `REPLY_S` | the explorer failed
Actors._get | a part starts | `START_S` | that part failed
Actors._again | what says that it is broken begins anew | up to `LONGEST_PAUSE_S` | killed
Actors._await_return | what died is back | `BACK_S`, with the next row | that part failed
Actors._tell | the explorer loads and opens | what is left of `BACK_S` | the explorer failed
Actors._watch | an actor's end | none: it is the wait for its death | it comes back, or the run \
ends; stopped: `STOPPED_S`
Actors.close | actors and threads end | a third of `shutdown_grace_s` each | killed
give_way | what failed may be over | up to `LONGEST_PAUSE_S` | another process
run/assembly.py
assemble | the tokenizer, which a thread loads | none: its library and a file of this machine | -
run/cards.py
_asked | the driver's tool | `ASK_S` | the start says so
ray_gpus | Ray's own words | `ASK_S` | the start says so
run/cluster.py
hold_rank_cards | GPUs of the ranks in Ray | `HOLD_S` | the start is refused
await_engine_cards | GPUs of engines in Ray | `JOIN_S` | the run ends
await_loss | the end of the Ray | none: until the run ends | half of `RECONNECT` without an \
answer, of a private one `SLOW_S`: the run ends
silence | a connection to the Ray's head | `LOOK_S`; at the start `RAY_S` | it is told as silent
run/control_socket.py
ControlSocket._serve | whoever asks `rft engines` | none: a thread of its own | nothing waits for \
it
ControlSocket.close | its thread | what is left of the grace | left behind, a daemon
run/children.py
run | the ranks' end | none: it is the wait for that | one has failed: the others end within 30 s, \
or are killed; stopped: within `shutdown_grace_s`
run/elastic.py
until_ended | ports of ranks that failed | `PAUSE_S` | ranks are started again
run/fleet.py
EngineFleet._ask | the synchronizer | the caller's; none for its news | dead: asked again every \
`AGAIN_S` until it is back or the run ends
EngineFleet._retire | an engine's orderly end | `ENDING_S` | killed with all of its processes
EngineFleet._attend | an engine's end; until then signs of life of its actor and its vLLM | none; \
without a sign, asked for every `BEAT_S`: `SILENT_S` | started again
EngineFleet._serve | an engine starts | `START_S` | started again
EngineFleet._take_out | requests of a removed engine | `max_timeout` and `REPLY_S` | they run \
again elsewhere
EngineFleet.await_started | all engines start | `START_S` and `REPLY_S` | the run ends
EngineFleet.describe | an engine's numbers | `STATS_S` | left out
run/launch.py
StageRun._close | killed ranks | the kernel | no signal is stronger
StageRun._stop_ranks | ranks save and end | `RANKS_SHARE` of `shutdown_grace_s` | killed
StageRun._ended | the ranks' launcher | none: it is the wait for its end | stopped, it or a rank: \
killed after `STOPPED_S`
run/modes.py
evaluate_checkpoints | engines load, sets are evaluated | `START_S`; none: `max_timeout` a task | \
the run ends
explore | versions, buffer, the explorer | `START_S`, `REPLY_S`; none for all of the work | the \
run ends
serve | versions, the address | `START_S`, `REPLY_S` | the run ends
run/outer.py
join | the killed watcher of stopped ranks | the kernel | -
_heard | what the ranks are to do, from the rank 0 of this attempt | `STARTED_S` | this rank ends
_is_heard | rank 0's own store | `REACH_S` | it is of an attempt before: asked again
_let_hear | all ranks, to hear that rank 0 ends | `HEARD_S` | it ends all the same
scontrol | Slurm | `SCONTROL_S` | the start fails
run/rank.py
tell | another, earlier failure | `SETTLE_S` | this one is told
run/recovery.py
RankWatch._run | the end of a rank | `LOOK_S`, again and again; then `PEERS_S`, or `KILLED_S` | \
its peers are killed
RankWatch.__exit__ | its own thread | none: `LOOK_S` | -
run/sidecar.py
Sidecar._watch | the sidecar's end | none, looked at every `LOOK_S` | rank 0 ends; stopped: \
killed after `STOPPED_S`
Sidecar.end | the sidecar closes | `shutdown_grace_s` and `END_S` | killed with its family
first_line | the sidecar's Ray | `SIDECAR_S` | killed, the start fails
main | the launcher's end | none: it is the wait for its death | the sidecar closes
run/spare.py
Spares._run | ranks that train | none: looked for every `LOOK_S` | no spare is begun
Spares._add | a spare that was killed | the kernel | -
Spares.__exit__ | its thread, and spares that were killed | the kernel: what the thread waits for \
ends with them | -
Spare.word | a spare's imports | none: it is nobody's, and ends with the launcher | none is kept
main | the launcher's word | none: the launcher's end is one | the spare ends
run/standstill.py
Standstill._run | the next look | `LOOK_S` | it looks
Standstill.close | its thread | one look | -
main | its thread, beside ranks without a sidecar | none: it ends with their first rank | -
run/supervisor.py
Supervisor.close | what is left of the run | `LAST_S` | killed
Supervisor.first_event | what ends the stage | none: any part's end or failure | the stage ends
root_cause | another, earlier failure | `SETTLE_S` | the first that came is named
run/warden.py
Warden.end | the killed warden | the kernel | -
look | the supervisor tells, or is gone | `LOOK_S`, again and again | it looks who is there
main | what a killed supervisor left | `ENDS_S` | killed
sync/buckets.py
Staging.reserve | a bucket is installed | `sync_timeout` | the round failed
sync/communicator.py
Communicator._build | members come together | none: `build` aborts it | the round failed
Communicator.build | members come together | `sync_timeout` | aborted, the round failed
await_posted | others' part of a message | `sync_timeout`, by the guard | aborted, the round failed
Communicator.running | a better reason of the guard | `GRACE_S` | the first reason counts
Guard._run | something at a wire | `TICK_S` | it looks at the deadlines
sync/connection.py
Listener._listen | an engine's worker | none: a thread of its own | -
Listener.close | its thread | none: it is woken | -
PeerConnection.receive | the other end | `sync_timeout` of the socket | the round failed
PeerConnection.wait | the other end's next bytes | `sync_timeout` of the socket | the round failed
handshake | a listener | `sync_timeout` | PeerLost: the round failed
sync/groups.py
Meeting.gather | members of a group | `sync_timeout` | the round failed
sync/links.py
NcclLink.receive | a message | `sync_timeout`, by the guard | aborted, the round failed
sync/origins.py
CheckpointOrigin.outcome | the save is committed | `deadline_s` | the ranks fail
DepositThread.wait | the thread that reads weights | `sync_timeout` | the ranks fail
MemoryOrigin._leave | Ray's object store | `sync_timeout` | the ranks fail
MemoryOrigin._await_lead | rank 0 connects again | `sync_timeout` and `REPLY_S` | the round \
fails, and the ranks
MemoryOrigin.renew | the thread that reads weights | `sync_timeout` | the round fails
MemoryOrigin.release | the thread that reads weights | `sync_timeout` | the ranks fail
sync/passing.py
Passing.run | its feeder | none: the feeder's messages have `sync_timeout` | -
Passing._next | its feeder | none: the feeder's messages have `sync_timeout` | -
Passing._feed_all | a free message | none: who walks ends it, within `sync_timeout` | -
sync/publisher.py
Origin.answer | the synchronizer | `sync_timeout` and `REPLY_S` | the ranks fail
Origin.lead.again | the same, as it begins anew | `sync_timeout` and `REPLY_S` | the round fails, \
and the ranks
Probe._ask | an engine answers the probe | `ANSWER_S` | rank 0 fails
Publisher.release | the round, where weights are read as they are | `sync_timeout` | the ranks \
fail
Publisher.rest | the round before engines sleep | `sync_timeout` | the ranks fail
Publisher.start | the round before | `sync_timeout` | the ranks fail
sync/receiver.py
Receiver._end | threads of a round that failed | `ENDS_S` | the next one has memory of its own
Receiver._fill | the next bytes of a trainer rank | `sync_timeout` of the socket | the round failed
Receiver._round | its readers | none: all has come, they say their last word | -
Receiver._taken | the next bucket of any stream | `sync_timeout` | the round failed
Receiver.connect | the round that it has cut off | `OVER_S` | PeerLost: tried again
sync/relay.py
Relay._wait | what a reader asked for | none, and a word every `WAIT_S` | its own round has \
`sync_timeout`
Relay.begin | readers of the version before | `SILENCE_S` | their connection is closed
sync/sender.py
VersionWindow.close | its readers | `sync_timeout` | named, their round failed
VersionWindow.reading | a version is open | `sync_timeout` | the worker is refused
WeightSender._admit | the plan | `sync_timeout` | the worker is refused
sync/stored_versions.py
Deposits.complete | all buckets are in the store | `sync_timeout` | the round failed
SavedVersions.follow | a newer version | none: looked for every `LOOK_S` | -
sync/synchronizer.py
_met | an engine says what it holds | `MEET_S` | started again
Synchronizer._published | the buffer | none: its callers' | the supervisor sees to the buffer
Synchronizer._keep_up | an engine connects | none: rank 0's `sync_timeout` and `REPLY_S` | the \
round failed
Synchronizer._put_to_sleep | an engine sleeps | `sync_timeout` | taken out, started again
Synchronizer._take | an engine's part of a round | none: rank 0's `sync_timeout` | the round \
failed
Synchronizer._ready | a new process hears who lives | none: its callers' | the supervisor tells \
it
Synchronizer._until | a change of the members | the caller's; none for who follows | -
Synchronizer.join | an engine's workers | none: `REPLY_S` of the fleet | that engine's thread
Synchronizer.publish | the buffer hears of it | none: rank 0's `sync_timeout` and `REPLY_S` | the \
ranks fail
tools/buffer.py
from_database | a database | `CONNECT_S`, `STATEMENT_S` | the command fails
tools/debug.py
attempt | one task | none: its `max_timeout` | the command ends
tools/demo.py
absent | the demo's own Python | `ASK_S` | the command fails
convert.said | the demo's own Python | `CONVERT_S` | the command fails
tools/doctor.py
of_slurm | a node | `NODE_S` | said of that node
of_node | a node | `NODE_S` | said of that node
tools/figures.py
_measure | two ranks that measure this machine | `MEASURE_S` | killed, the command fails
tools/init.py
gpus_of_slurm | Slurm | `SINFO_S` | as if there were none
tools/machine_check.py
ports | its own connection | a number of its own, 5 s | said
meet | two processes meet | twice `MEET_S` | killed, said
links | the driver's tool | `MEET_S` | said
trainer/control.py
BufferCall.answer | the buffer, which may come back | `RETURN_S`; a batch: `max_read_timeout` and \
`READ_MARGIN_S` | rank 0 fails
Evaluations._ask | an explorer that is alive | `RETURN_S` | rank 0 fails
Evaluations._collect | an evaluation | 0: only if it is there; else `beat_s`, again and again, \
`max_timeout` a task | the explorer is asked
Evaluations.at_startup | the explorer begins, or comes back | `RETURN_S` | rank 0 fails
PoolNumbers.metrics | the explorer's numbers | 0: only if they are there | the last ones count
QueueSource.look | the next step's groups, in a thread | `max_read_timeout` and `READ_MARGIN_S` | \
they are taken without
_is_there | all parts serve | `beat_s`, again and again, `START_S` in all | rank 0 fails
await_engines | an explorer that is to sample nothing more | `RETURN_S` | rank 0 fails
sampled | engines that speculate answer | `START_S` | rank 0 fails
trainer/looking.py
ReadAhead.end | what is read ahead is made, or let go | `max_read_timeout` and `READ_MARGIN_S` | \
all is taken
trainer/trainer.py
Trainer._evaluate | engines have the version | `sync_timeout` and `REPLY_S` | the rank fails
Trainer._await_save | the last save | twice `agent_deadline_s` | once more, then the rank fails
Trainer._finish | the last round | `sync_timeout` and `REPLY_S` | the rank fails
Trainer._save | copies of earlier saves | 0: only if they are there | looked at again next step
Trainer.fit | engines have the version | `sync_timeout` and `REPLY_S` | the rank fails
"""


def declared() -> list[Declared]:
    found, file = [], ""
    for line in TABLE.strip().splitlines():
        if " | " not in line:
            file = line
        else:
            function, whom, limit, then = line.split(" | ")
            found.append(Declared(file, function, whom, limit, then))
    return found
