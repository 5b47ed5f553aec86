"""Waves as a model for explore: the real machines of ranks and coordinator, links between them, a collective, clients, crashes.

Everything on its way is part of the state: each link keeps its order, and any delay between links is possible. A step is a
collective that all ranks enter with their ballots, and whose outcome each takes when it likes. A crash ends the whole group, rank
by rank, before it is started anew; a new coordinator knows nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

from tests.sim.explore import Move, Violation
from trireme.coordinator.waves import Waves
from trireme.engine_core.lifecycle.wave import Wave
from trireme.errors import CollectiveError
from trireme.topology.lockstep import Agreed, Ballot, Mode, agree
from trireme.transport.wire.messages import WaveOrder, WaveReport

Frozen: TypeAlias = tuple[Any, ...]  # a machine's slots


class Row(NamedTuple):
    """A request at a rank. It has begun once it was planned."""

    number: int
    need: int
    planned: int = 0
    finished: int = 0


class Rank(NamedTuple):
    is_alive: bool
    is_welcome: bool  # by the present coordinator
    wave: Frozen
    rows: tuple[Row, ...] = ()
    plans: tuple[tuple[int, ...], ...] = ()  # rows of each step under way


class Outcome(NamedTuple):
    """What a rank learns from a collective, and what it ought to."""

    agreed: Agreed
    ought: Agreed


class Vote(NamedTuple):
    """What a rank says, and what it ought to."""

    ballot: Ballot
    ought: Ballot


class Collective(NamedTuple):
    entered: tuple[tuple[Vote, ...], ...]
    outcomes: tuple[tuple[Outcome, ...], ...]
    is_broken: bool = False


class Client(NamedTuple):
    """Pauses and resumes it has yet to ask for. `number`: what it waits for."""

    script: tuple[Mode, ...]
    number: int = 0


class Outside(NamedTuple):
    arrivals: tuple[tuple[int, int, int], ...]  # (request, rank, steps) yet to come, in any order
    clients: tuple[Client, ...]
    crashes: int
    restarts: int  # of the coordinator
    serial: int = 0
    promised: int = 0  # the pause that was answered and holds
    ended: int = 0  # a bit per request


class Setting(NamedTuple):
    """What happens from outside. A request is (rank, steps)."""

    requests: tuple[tuple[int, int], ...] = ((0, 1), (1, 1))
    scripts: tuple[tuple[Mode, ...], ...] = ()
    crashes: int = 0
    restarts: int = 0
    ranks: int = 3
    depth: int = 1
    in_order: bool = True  # False: orders overtake each other on their way to a rank


class World(NamedTuple):
    """A whole state, as numbers of interned parts."""

    coordinator: int
    ranks: tuple[int, ...]
    ups: tuple[int, ...]
    downs: tuple[int, ...]
    collective: int
    outside: int


class _Parts:
    """Parts by number, each kept once."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self.values: list[Any] = []

    def number(self, value: Hashable) -> int:
        found = self._numbers.get(value)
        if found is None:
            found = self._numbers[value] = len(self.values)
            self.values.append(value)
        return found


class _Machine:
    """A class with __slots__ whose objects can be frozen to tuples and thawed again."""

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self._slots = next(tuple(base.__slots__) for base in kind.__mro__ if getattr(base, "__slots__", ()))
        self.freeze: Callable[[Any], Frozen] = attrgetter(*self._slots)

    def thaw(self, values: Frozen) -> Any:
        found = self._kind.__new__(self._kind)
        for name, value in zip(self._slots, values, strict=True):
            setattr(found, name, value)
        return found


class WaveModel:
    """Satisfies explore.Model. Other classes for the machines, or another agreement, plant a fault."""

    def __init__(
        self,
        setting: Setting,
        *,
        wave: type[Wave] = Wave,
        waves: type[Waves] = Waves,
        agreement: Callable[[Sequence[Ballot]], Agreed] = agree,
    ) -> None:
        self._setting = setting
        self._wave, self._waves, self._agree = wave, waves, agreement
        self._wave_machine, self._waves_machine = _Machine(wave), _Machine(waves)
        self._parts = _Parts()
        self._known: dict[tuple[Any, ...], Any] = {}  # outcomes of local events

    def initial(self) -> World:
        """All ranks are connected and parked: what the protocol comes to before anything happens outside."""
        world = self.begin()
        while quiet := [move.state for move in self.moves(world) if move.is_protocol]:
            world = quiet[0]
        return world

    def part(self, number: int) -> Any:
        """A part of a world."""
        return self._parts.values[number]

    def freeze(self, machine: Any) -> Frozen:
        """A machine outside as it would be here."""
        return (self._wave_machine if isinstance(machine, Wave) else self._waves_machine).freeze(machine)

    def begin(self) -> World:
        """Before anybody has met anybody."""
        setting, put = self._setting, self._parts.number
        size = setting.ranks
        return World(
            put(self._waves_machine.freeze(self._waves(size))),
            tuple(put(self._new_rank(rank, 0)) for rank in range(size)),
            (put(()),) * size,
            (put(()),) * size,
            put(Collective(((),) * size, ((),) * size)),
            put(
                Outside(
                    tuple((number, *request) for number, request in enumerate(setting.requests)),
                    tuple(Client(script) for script in setting.scripts),
                    setting.crashes,
                    setting.restarts,
                )
            ),
        )

    # ------------------------------------------------------------ events

    def moves(self, world: World) -> Iterator[Move]:
        values, put = self._parts.values, self._parts.number
        outside: Outside = values[world.outside]
        collective: Collective = values[world.collective]
        ranks: list[Rank] = [values[rank] for rank in world.ranks]
        for i, rank in enumerate(ranks):
            if not rank.is_alive and not collective.is_broken:
                up = put(rank._replace(is_alive=True))
                yield Move(f"rank {i} is up", world._replace(ranks=_with(world.ranks, i, up)), True)
            if values[world.ups[i]]:
                yield Move(f"coordinator hears {values[world.ups[i]][0]} of rank {i}", self._hear(world, i), True)
            if not rank.is_alive:
                continue
            if not rank.is_welcome:
                yield Move(f"rank {i} and the coordinator meet", self._meet(world, i), True)
            orders = values[world.downs[i]]
            for at, order in enumerate(orders[:1] if self._setting.in_order else orders):
                yield Move(f"rank {i} hears {order}", self._deliver(world, i, at), True)
            if collective.outcomes[i]:
                outcome, rest = collective.outcomes[i][0], collective.outcomes[i][1:]
                taken = collective._replace(outcomes=_with(collective.outcomes, i, rest))
                after = self._at_rank(world._replace(collective=put(taken)), i, "outcome", outcome)
                yield Move(f"rank {i} learns {outcome.agreed}", after, True)
            if self._may_vote(world.ranks[i]):
                yield Move(f"rank {i} votes", self._vote(world, i, outside), True)
            if outside.crashes:
                fewer = world._replace(outside=put(outside._replace(crashes=outside.crashes - 1)))
                yield Move(f"rank {i} crashes", self._die(fewer, i), False)
            if collective.is_broken:
                yield Move(f"rank {i} is ended with its group", self._die(world, i), True)
        if collective.is_broken and not any(rank.is_alive for rank in ranks):
            yield Move("the group starts again", self._restart_group(world, ranks), True)
        for arrival in outside.arrivals:
            number, i, need = arrival
            if ranks[i].is_alive:
                left = tuple(other for other in outside.arrivals if other != arrival)
                came = world._replace(outside=put(outside._replace(arrivals=left)))
                yield Move(
                    f"request {number} comes to rank {i}", self._at_rank(came, i, "row", Row(number, need)), False
                )
        for c, client in enumerate(outside.clients):
            if client.script and not client.number:
                event = f"client {c} asks for {client.script[0] or 'resume'}"
                yield Move(event, self._ask(world, c, outside), False)
        if outside.restarts:
            yield Move("the coordinator is replaced", self._restart_coordinator(world, outside, ranks), False)

    def unsettled(self, world: World) -> str:
        """Disconnected alone, everything that came has ended, or is held by a pause that holds; every call is answered."""
        values = self._parts.values
        outside: Outside = values[world.outside]
        ranks: list[Rank] = [values[rank] for rank in world.ranks]
        for c, client in enumerate(outside.clients):
            if client.number:
                return f"client {c} never hears of its {client.script[0] or 'resume'}"
        held = 0
        mode = self._waves_machine.thaw(values[world.coordinator]).mode
        for i, rank in enumerate(ranks):
            if values[world.collective].entered[i]:
                return f"rank {i} waits in a collective for ever"
            for row in rank.rows:
                held |= 1 << row.number
                if mode == "" or (row.planned and mode != "keep"):
                    return f"request {row.number} waits at rank {i} for ever"
        came = ((1 << len(self._setting.requests)) - 1) & ~sum(1 << arrival[0] for arrival in outside.arrivals)
        return "" if came == outside.ended | held else f"requests {came & ~(outside.ended | held):b} are lost"

    # ------------------------------------------------------------ ranks

    def _new_rank(self, rank: int, epoch: int) -> Rank:
        return Rank(True, False, self._wave_machine.freeze(self._wave(rank, epoch, self._setting.depth)))

    def _may_vote(self, rank: int) -> bool:
        key = ("may vote", rank)
        if key not in self._known:
            self._known[key] = self._wave_machine.thaw(self._parts.values[rank].wave).may_vote
        return bool(self._known[key])

    def _at_rank(self, world: World, i: int, event: str, what: Any) -> World:
        """A local event of rank `i`: its new state, and what follows elsewhere."""
        key = (event, world.ranks[i], what)
        if key not in self._known:
            self._known[key] = self._step_rank(self._parts.values[world.ranks[i]], event, what)
        rank, vote, report, ended = self._known[key]
        world = world._replace(ranks=_with(world.ranks, i, rank))
        if report is not None:
            world = world._replace(ups=_with(world.ups, i, self._push(world.ups[i], report)))
        if vote is not None:
            world = world._replace(collective=self._enter(world.collective, i, vote))
        return self._end(world, ended) if ended else world

    def _step_rank(self, rank: Rank, event: str, what: Any) -> tuple[int, Vote | None, WaveReport | None, int]:
        """As EngineLoop does it."""
        wave, rows, plans, ended = self._wave_machine.thaw(rank.wave), list(rank.rows), rank.plans, 0
        is_welcome, vote = rank.is_welcome, None
        if event == "welcome":
            is_welcome = True
            wave.welcome()
        elif event == "order":
            if wave.on_order(what) and what.mode == "abort":
                ended, rows = sum(1 << row.number for row in rows), []
        elif event == "row":
            rows.append(what)
        elif event == "vote":
            ought = _ballot(wave, rows)
            vote = Vote(wave.vote(begun=_begun(rows), queued=len(rows) - _begun(rows)), ought)
            runs = {row.number for row in rows if row.planned < row.need and (row.planned or wave.admits)}
            rows = [row._replace(planned=row.planned + 1) if row.number in runs else row for row in rows]
            plans = (*plans, tuple(sorted(runs)))
        elif event == "outcome":
            was_open = wave.last is None
            wave.on_agreed(what.agreed)
            _check_end(wave, what.ought, was_open=was_open)
            rows = [row._replace(finished=row.finished + 1) if row.number in plans[0] else row for row in rows]
            ended, plans = sum(1 << row.number for row in rows if row.finished == row.need), plans[1:]
            rows = [row for row in rows if row.finished < row.need]
        report = wave.report(begun=_begun(rows), queued=len(rows) - _begun(rows)) if is_welcome else None
        after = Rank(True, is_welcome, self._wave_machine.freeze(wave), tuple(rows), plans)
        return self._parts.number(after), vote, report, ended

    def _vote(self, world: World, i: int, outside: Outside) -> World:
        if outside.promised:
            raise Violation(f"rank {i} steps although the group is paused")
        if not self._parts.values[world.collective].is_broken:
            for j, rank in enumerate(world.ranks):
                if not self._parts.values[rank].is_alive:
                    raise Violation(f"rank {i} enters a collective before rank {j} is up")
        return self._at_rank(world, i, "vote", None)

    def _enter(self, collective: int, i: int, vote: Vote) -> int:
        key = ("enter", collective, i, vote)
        if key not in self._known:
            found: Collective = self._parts.values[collective]
            entered = _with(found.entered, i, (*found.entered[i], vote))
            outcomes = found.outcomes
            if all(entered) and not found.is_broken:
                heads = [votes[0] for votes in entered]
                try:
                    outcome = Outcome(self._agree([v.ballot for v in heads]), agree([v.ought for v in heads]))
                except CollectiveError as error:
                    raise Violation(error.message) from None
                entered = tuple(votes[1:] for votes in entered)
                outcomes = tuple((*mine, outcome) for mine in outcomes)
            self._known[key] = self._parts.number(found._replace(entered=entered, outcomes=outcomes))
        return int(self._known[key])

    def _end(self, world: World, rows: int) -> World:
        outside: Outside = self._parts.values[world.outside]
        if outside.ended & rows:
            raise Violation(f"requests {outside.ended & rows:b} end twice")
        return world._replace(outside=self._parts.number(outside._replace(ended=outside.ended | rows)))

    # ------------------------------------------------------------ links and coordinator

    def _push(self, link: int, message: Any) -> int:
        return self._parts.number((*self._parts.values[link], message))

    def _pop(self, links: tuple[int, ...], i: int, at: int = 0) -> tuple[Any, tuple[int, ...]]:
        messages = self._parts.values[links[i]]
        return messages[at], _with(links, i, self._parts.number((*messages[:at], *messages[at + 1 :])))

    def _deliver(self, world: World, i: int, at: int) -> World:
        order, downs = self._pop(world.downs, i, at)
        return self._at_rank(world._replace(downs=downs), i, "order", order)

    def _meet(self, world: World, i: int) -> World:
        """Hello and Welcome. Messages of a former life of the rank may still come after them."""
        epoch = self._wave_machine.thaw(self._parts.values[world.ranks[i]].wave).epoch
        return self._at_rank(self._at_coordinator(world, (i, ("hello", epoch))), i, "welcome", None)

    def _hear(self, world: World, i: int) -> World:
        message, ups = self._pop(world.ups, i)
        return self._at_coordinator(world._replace(ups=ups), (i, message))

    def _at_coordinator(self, world: World, event: Any) -> World:
        """An event there; orders go out, and clients whose calls are answered hear it."""
        key = ("coordinator", world.coordinator, event)
        if key not in self._known:
            self._known[key] = self._step_coordinator(self._parts.values[world.coordinator], event)
        coordinator, orders = self._known[key]
        downs = world.downs
        for rank, order in orders:
            if self._parts.values[world.ranks[rank]].is_alive:
                downs = _with(downs, rank, self._push(downs[rank], order))
        return self._answer(world._replace(coordinator=coordinator, downs=downs))

    def _step_coordinator(self, frozen: Frozen, event: Any) -> tuple[int, list[tuple[int, WaveOrder]]]:
        waves = self._waves_machine.thaw(frozen)
        rank, message = event
        if rank is None:
            waves.direct(message)
        elif isinstance(message, WaveReport):
            waves.reported(message)
        elif message[0] == "hello":
            waves.connected(rank, message[1])
        else:
            waves.lost(rank, message[1])
        orders = waves.orders()
        return self._parts.number(self._waves_machine.freeze(waves)), orders

    def _answer(self, world: World) -> World:
        outside: Outside = self._parts.values[world.outside]
        if not any(client.number for client in outside.clients):
            return world
        waves = self._waves_machine.thaw(self._parts.values[world.coordinator])
        clients, promised = outside.clients, outside.promised
        for c, client in enumerate(clients):
            stands = waves.standing(client.number) if client.number else False
            if stands is False:
                continue
            clients = _with(clients, c, Client(client.script[1:]))
            if stands and client.script[0]:
                promised = client.number
                self._check_still(world)
        return world._replace(outside=self._parts.number(outside._replace(clients=clients, promised=promised)))

    def _check_still(self, world: World) -> None:
        for i, number in enumerate(world.ranks):
            rank: Rank = self._parts.values[number]
            if self._wave_machine.thaw(rank.wave).running:
                raise Violation(f"the group is said to be paused while rank {i} runs")

    def _ask(self, world: World, c: int, outside: Outside) -> World:
        client = outside.clients[c]
        waves = self._waves_machine.thaw(self._parts.values[world.coordinator])
        number = waves.direct(client.script[0])
        clients = _with(outside.clients, c, client._replace(number=number))
        outside = outside._replace(clients=clients, promised=0)
        return self._at_coordinator(world._replace(outside=self._parts.number(outside)), (None, client.script[0]))

    # ------------------------------------------------------------ ends and beginnings

    def _die(self, world: World, i: int) -> World:
        put, values = self._parts.number, self._parts.values
        rank: Rank = values[world.ranks[i]]
        broken = values[world.collective]._replace(is_broken=True)
        epoch = self._wave_machine.thaw(rank.wave).epoch
        world = world._replace(
            ranks=_with(world.ranks, i, put(rank._replace(is_alive=False, rows=(), plans=()))),
            ups=_with(world.ups, i, self._push(world.ups[i], ("left", epoch))),
            downs=_with(world.downs, i, put(())),
            collective=put(broken),
        )
        ended = sum(1 << row.number for row in rank.rows)
        return self._end(world, ended) if ended else world

    def _restart_group(self, world: World, ranks: list[Rank]) -> World:
        put, size = self._parts.number, len(ranks)
        epoch = self._wave_machine.thaw(ranks[0].wave).epoch + 1
        return world._replace(
            ranks=tuple(put(self._new_rank(i, epoch)._replace(is_alive=False)) for i in range(size)),
            collective=put(Collective(((),) * size, ((),) * size)),
        )

    def _restart_coordinator(self, world: World, outside: Outside, ranks: list[Rank]) -> World:
        """What was on its way from and to the old one is lost. A pause that no living rank knows of is lost with it."""
        put, serial = self._parts.number, outside.serial + 1
        waves = [self._wave_machine.thaw(rank.wave) for rank in ranks]
        known = max((wave.number for wave, rank in zip(waves, ranks, strict=True) if rank.is_alive), default=0)
        outside = outside._replace(
            restarts=outside.restarts - 1,
            serial=serial,
            clients=tuple(client._replace(number=0) for client in outside.clients),
            promised=outside.promised if outside.promised <= known else 0,
        )
        return World(
            put(self._waves_machine.freeze(self._waves(len(ranks), serial))),
            tuple(put(rank._replace(is_welcome=False)) for rank in ranks),
            (put(()),) * len(ranks),
            (put(()),) * len(ranks),
            world.collective,
            put(outside),
        )


def _with(items: tuple[Any, ...], i: int, value: Any) -> tuple[Any, ...]:
    return (*items[:i], value, *items[i + 1 :])


def _ballot(wave: Wave, rows: Sequence[Row]) -> Ballot:
    """What a rank in that state has to say, in the words of the pause's three modes."""
    begun = _begun(rows)
    has_work = len(rows) > 0 if wave.mode == "" else begun > 0
    is_ready = wave.mode in ("keep", "abort") or (wave.mode == "wait" and begun == 0)
    return Ballot(wave.wave, wave.voted + 1, has_work, is_ready)


def _check_end(wave: Wave, ought: Agreed, *, was_open: bool) -> None:
    """A wave ends exactly when it should: nobody parks early, and nobody computes for nothing."""
    ends = not wave.running or wave.last is not None or wave.agreed == 0
    if was_open and ends and ought.has_work and not ought.is_ready:
        raise Violation(f"rank {wave.rank} ends wave {wave.wave} although there is work")
    if was_open and not ends and (not ought.has_work or ought.is_ready):
        raise Violation(f"rank {wave.rank} goes on with wave {wave.wave} although nobody needs it")


def _begun(rows: Sequence[Row]) -> int:
    return sum(row.planned > 0 for row in rows)
