"""`status()`, who waits for what in words; `metrics()`, how it goes in numbers."""

from typing import TYPE_CHECKING, Any

from rollout.batches.entries import GroupState, SampleState
from rollout.batches.metrics import ledger_metrics

if TYPE_CHECKING:
    from rollout.fleet.coordinator import Coordinator

Status = dict[str, Any]

SHOWN = 5


def status_of(coordinator: "Coordinator") -> Status:
    """JSON-safe. "waits_for" is a list of sentences, the first the most likely culprit."""
    ledger = coordinator.collection.ledger
    now = coordinator.loop.now()
    return {
        "version": coordinator.version,
        "waits_for": waits_for(coordinator),
        "stalled": coordinator.stalled(),
        "fatal": None if coordinator.fatal is None else repr(coordinator.fatal),
        "draining": coordinator.is_draining,
        "samples": ledger.counts(),
        "groups": {str(state): ledger.num_groups(state) for state in GroupState},
        "late_results": ledger.late,
        "duplicate_results": ledger.duplicates,
        "next_batch_waiting": coordinator.handout.num_waiting,
        "leases": {
            str(lease.number): {"groups": len(lease.groups), "version": lease.version, "age_s": now - lease.since}
            for lease in coordinator.handout.leases.values()
        },
        "prompts": {"handed_out": coordinator.prompts.cursor, "exhausted": coordinator.prompts.is_known_exhausted},
        "workers": {
            seat.worker_id: {
                "state": str(seat.state),
                "incarnation": seat.incarnation,
                "version": seat.version,
                "samples": ledger.num_running_on(seat.worker_id),
                "tokens_per_s": seat.tokens_per_s,
                "restarts": seat.num_restarts,
                "reason": seat.reason,
            }
            for seat in coordinator.roster.seats.values()
        },
        "last_failure": coordinator.collection.last_failure,
    }


def metrics_of(coordinator: "Coordinator") -> dict[str, float]:
    """By the field's names."""
    ledger = coordinator.collection.ledger
    attempts = {str(ending): count for ending, count in ledger.attempts_ended.items()}
    values = coordinator.metrics.as_dict(coordinator.loop.now())
    values |= ledger_metrics(ledger.counts(), ledger.imbalance(), attempts)
    values |= {f"rollout/groups_{state}": float(ledger.num_groups(state)) for state in GroupState}
    values["rollout/late_results"] = float(ledger.late)
    values["rollout/duplicate_results"] = float(ledger.duplicates)
    values["engine/version"] = float(coordinator.version)
    values["engine/idle_share"] = coordinator.roster.idle_share()
    rates = [seat.tokens_per_s for seat in coordinator.roster.seats.values()]
    values["engine/tokens_per_s"] = sum(rates)
    values["engine/tokens_per_s_per_worker"] = sum(rates) / len(rates) if rates else 0.0
    return values


def waits_for(coordinator: "Coordinator") -> list[str]:
    """What keeps the next batch from being handed out."""
    ledger = coordinator.collection.ledger
    reasons: list[str] = []
    if not coordinator.roster.seats:
        reasons.append("the fleet has no workers; controller.add_worker() brings one")
    not_serving = [
        f"{seat.worker_id} is {seat.state}"
        + (f" at version {seat.version}" if seat.version < coordinator.version else "")
        + (f" ({seat.reason})" if seat.reason is not None else "")
        for seat in coordinator.roster.seats.values()
        if not coordinator.roster.serves(seat, coordinator.version)
    ]
    if not_serving:
        reasons.append(
            f"{len(not_serving)} of {len(coordinator.roster.seats)} workers take no work at version "
            f"{coordinator.version}: {_some(not_serving)}"
        )
    if rewarding := ledger.num_samples(SampleState.REWARDING):
        reasons.append(f"{rewarding} rollouts wait for their rewards")
    running = sorted(ledger.groups(GroupState.OPEN), key=lambda group: group.order)
    if running:
        where = [
            f"{group.group_id} on {', '.join(sorted({s.worker_id for s in group.samples.values() if s.worker_id})) or 'no worker'}"
            for group in running
        ]
        ready = ledger.num_groups(GroupState.READY)
        reasons.append(
            f"{ready} of {coordinator.config.prompts_per_step} groups of a batch are ready; {len(running)} are not: {_some(where)}"
        )
    for lease in coordinator.handout.leases.values():
        age_s = coordinator.loop.now() - lease.since
        reasons.append(
            f"lease {lease.number} of {len(lease.groups)} groups is out since {age_s:.0f} s; groups that may not span its "
            f"publish (max_staleness={coordinator.config.max_staleness}) wait for that"
        )
    if not running and not coordinator.handout.leases and not ledger.num_groups(GroupState.READY):
        reasons.append("no group is outstanding" + (": it is draining" if coordinator.is_draining else ""))
    return reasons


def _some(items: list[str]) -> str:
    return ", ".join(items[:SHOWN]) + (f", and {len(items) - SHOWN} others" if len(items) > SHOWN else "")
