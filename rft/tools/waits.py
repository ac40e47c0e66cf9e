"""Every wait of the parts of a run for each other: where it is in the code, for whom, how long, and
what then. `docs/launch.md` shows it.

In: the table below, by hand. Out: its rows. Invariant: a test finds the waits in the sources of
PLACES, and fails where one is not declared here, or one that is declared is gone. What is said of
a limit names the constant or key that holds it; "none" means that only the end of somebody ends it,
and then that end has a deadline of its own, which the row names. A bare `await` of a future that
the same process sets is none of these.
"""

from dataclasses import dataclass

PLACES = ("run", "trainer", "rollout", "sync")  # directories of rft, without those in them


@dataclass(frozen=True)
class Declared:
    file: str  # below rft/
    function: str
    whom: str
    limit: str
    then: str


# FILE: FUNCTION | for whom | how long | what then
TABLE = """
run/actors.py
Actors._begin | explorer opens | `REPLY_S` | the explorer failed
Actors._get | a part starts | `START_S` | that part failed
Actors._again | what says that it is broken begins anew | up to `LONGEST_PAUSE_S` | killed
Actors._await_return | what died is back | `BACK_S`, with the next row | that part failed
Actors._tell | the explorer loads and opens | what is left of `BACK_S` | the explorer failed
Actors._watch | an actor's end | none: it is the wait for its death | it comes back, or the run \
ends; stopped: `STOPPED_S`
Actors.close | actors and threads end | a third of `shutdown_grace_s` each | killed
run/cluster.py
hold_rank_cards | GPUs of the ranks in Ray | `HOLD_S` | the start is refused
run/control_socket.py
ControlSocket._serve | whoever asks `rft engines` | none: a thread of its own | nothing waits for it
ControlSocket.close | its thread | what is left of the grace | left behind, a daemon
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
StageRun._ended | torch's launcher | none: it is the wait for its end | stopped, it or a \
rank: killed after `STOPPED_S`
run/modes.py
evaluate_checkpoints | engines load, sets are evaluated | `START_S`; none: `max_timeout` a task | \
the run ends
explore | versions, buffer, the explorer | `START_S`, `REPLY_S`; none for all of the work | the \
run ends
serve | versions, the address | `START_S`, `REPLY_S` | the run ends
run/outer.py
join | the killed watcher of stopped ranks | the kernel | -
run/sidecar.py
Sidecar._watch | the sidecar's end | none, looked at every `LOOK_S` | rank 0 ends; stopped: \
killed after `STOPPED_S`
Sidecar.end | the sidecar closes | `shutdown_grace_s` and `END_S` | killed with its family
first_line | the sidecar's Ray | `SIDECAR_S` | killed, the start fails
main | the launcher's end | none: it is the wait for its death | the sidecar closes
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
trainer/control.py
Evaluations._collect | an evaluation | `max_timeout` and `RETURN_S` | rank 0 fails
Evaluations.at_startup | the explorer begins, or comes back | `RETURN_S` | rank 0 fails
PoolNumbers.metrics | the explorer's numbers | 0: only if they are there | the last ones count
QueueSource._call | the buffer, which may come back | `RETURN_S`; a batch: `max_read_timeout` and \
`READ_MARGIN_S` | rank 0 fails
await_engines | all parts serve | `START_S`, then `RETURN_S` | rank 0 fails
trainer/trainer.py
Trainer._evaluate | engines have the version | `sync_timeout` and `REPLY_S` | the rank fails
Trainer._await_save | the last save | twice `agent_deadline_s` | once more, then the rank fails
Trainer._finish | the last round | `sync_timeout` and `REPLY_S` | the rank fails
Trainer._save | copies of earlier saves | 0: only if they are there | looked at again next step
Trainer.fit | engines have the version | `sync_timeout` and `REPLY_S` | the rank fails
rollout/adapter_serving.py
AdapterServing._room | requests of an old adapter | `sync_timeout` | the engine fails the round
rollout/engine.py
RolloutEngine._watch_processes.sleep_until_one_ends | vLLM's processes end | none: it is the wait \
for their death | the engine failed; stopped: `STOPPED_S`
rollout/engine_weights.py
Turns.request | the engine wakes | none: the task's `max_timeout` | the task is tried again
Turns.sleep | requests under way | a share of `sync_timeout` | frozen as they are
rollout/environments.py
Environments.episode | a place among the episodes | none: the task's `max_timeout` | the task fails
Episode._ask | an environment's step | `step_timeout` | its process is killed
Episode.drive | an environment's whole episode | what is left of the task | its process is killed
Host.ask | an environment's answer | the caller's limit | its process is killed
Host.start | an environment's setup | `start_timeout` | its process is killed
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
rollout/pool.py
EnginePool._ask | an engine's answer | none: the task's `max_timeout` | the engine is told to stop
EnginePool.abort | an engine | none: the task's `max_timeout` | -
EnginePool.drain | its requests | none: `drain_s` of who asks | they run again elsewhere
EnginePool.follow | a change of the members | none: until the synchronizer ends | the run ends
EnginePool.generate | an engine that serves | none: the task's `max_timeout` | the task fails
ResizableSemaphore.__aenter__ | a place | none: tasks end within `max_timeout` | -
rollout/reward_pool.py
RewardPool._ask | a worker loads | `_load_timeout_s` | killed
RewardPool._heard | a reward | `timeout_s` in which its worker is not stopped; stopped: \
`STOPPED_S` | killed; an outcome of its own; stopped: done again, once
rollout/runner.py
Runner.run | one task | `max_timeout`, or the limit of its step | cancelled, tried again
end | a cancelled workflow | `CANCEL_S` | left alone, without engines
rollout/worker_channel.py
WorkerChannel.stage | the engine's workers | `sync_timeout` | the engine failed the round
within_reach | the object store | `sync_timeout` | the engine failed the round
sync/buckets.py
Staging.reserve | a bucket is installed | `sync_timeout` | the round failed
sync/communicator.py
Communicator._build | members come together | none: `build` aborts it | the round failed
Communicator.build | members come together | `sync_timeout` | aborted, the round failed
Communicator.running | a better reason of the guard | `GRACE_S` | the first reason counts
Guard._run | something at a wire | `TICK_S` | it looks at the deadlines
sync/connection.py
Listener._listen | an engine's worker | none: a thread of its own | -
Listener.close | its thread | none: it is woken | -
PeerConnection.receive | the other end | `sync_timeout` of the socket | the round failed
sync/groups.py
WorkerGroup.finish | a broadcast | `sync_timeout`, by the guard | aborted, the round failed
Meeting.gather | members of a group | `sync_timeout` | the round failed
sync/links.py
NcclLink._await | a message is sent | `sync_timeout`, by the guard | aborted, the round failed
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
sync/publisher.py
Origin.answer | the synchronizer | `sync_timeout` and `REPLY_S` | the ranks fail
Origin.lead.again | the same, as it begins anew | `sync_timeout` and `REPLY_S` | the round fails, \
and the ranks
Probe._ask | an engine answers the probe | `ANSWER_S` | rank 0 fails
Publisher.release | the round, where weights are read as they are | `sync_timeout` | the ranks fail
Publisher.rest | the round before engines sleep | `sync_timeout` | the ranks fail
Publisher.start | the round before | `sync_timeout` | the ranks fail
sync/receiver.py
Receiver._round | its readers | none: all has come, they say their last word | -
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
sync/synchronizer.py
_met | an engine says what it holds | `MEET_S` | started again
Synchronizer._published | the buffer | none: its callers' | the supervisor sees to the buffer
Synchronizer._keep_up | an engine connects | none: rank 0's `sync_timeout` and `REPLY_S` | the \
round failed
Synchronizer._put_to_sleep | an engine sleeps | `sync_timeout` | taken out, started again
Synchronizer._take | an engine's part of a round | none: rank 0's `sync_timeout` | the round failed
Synchronizer._ready | a new process hears who lives | none: its callers' | the supervisor tells it
Synchronizer._until | a change of the members | the caller's; none for who follows | -
Synchronizer.join | an engine's workers | none: `REPLY_S` of the fleet | that engine's thread
Synchronizer.publish | the buffer hears of it | none: rank 0's `sync_timeout` and `REPLY_S` | the \
ranks fail
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
