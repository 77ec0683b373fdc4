"""A network in virtual time: flows of bytes over ports that they share, each after those that it has to wait for.

An update's messages are played through it in the order in which they are really sent: that tells what waiting for one another
adds to what the busiest link needs. Pure values, without torch.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Mapping, Sequence

Port = tuple[str, Hashable]
"""A kind of port, which has a rate, and which of them: `("InfiniBand out", 5)`."""


class SimulatedNetwork:
    """Flows are added in any order that names those that they wait for before them, and then played."""

    def __init__(self, bytes_per_s: Mapping[str, float]) -> None:
        """`bytes_per_s`: by kind, what one port carries."""
        self._rates = bytes_per_s
        self._numbers: dict[Port, int] = {}
        self._capacity: list[float] = []
        self._nbytes: list[float] = []
        self._waits_s: list[float] = []
        self._ports: list[tuple[int, ...]] = []
        self._after: list[Sequence[int]] = []
        self._carried: list[float] = []

    def flow(self, nbytes: float, ports: Iterable[Port] = (), after: Iterable[int] = (), wait_s: float = 0.0) -> int:
        """Add a flow of `nbytes` over `ports`, which begins `wait_s` seconds after all flows in `after` have ended.

        Each port is shared evenly by its flows, and a flow is as fast as its slowest share. Returns the flow's number.
        """
        numbers = tuple(self._port(port) for port in ports)
        for number in numbers:
            self._carried[number] += nbytes
        self._nbytes.append(float(nbytes) if numbers else 0.0)
        self._waits_s.append(wait_s)
        self._ports.append(numbers)
        self._after.append(tuple(after))
        return len(self._nbytes) - 1

    def _port(self, port: Port) -> int:
        if port not in self._numbers:
            self._numbers[port] = len(self._capacity)
            self._capacity.append(self._rates[port[0]])
            self._carried.append(0.0)
        return self._numbers[port]

    def busiest_s(self, kinds: Iterable[str] | None = None) -> float:
        """The seconds that the busiest port, of these `kinds` (None: of all), needs for what it carries: no order is faster."""
        of_kinds = self._rates.keys() if kinds is None else set(kinds)
        return max(
            (self._carried[number] / self._capacity[number] for (kind, _), number in self._numbers.items() if kind in of_kinds),
            default=0.0,
        )

    def play(self) -> list[float]:
        """The seconds at which each flow ends, from the beginning on."""
        followers: list[list[int]] = [[] for _ in self._nbytes]
        waits_for = [len(after) for after in self._after]
        for flow, after in enumerate(self._after):
            for other in after:
                followers[other].append(flow)
        ends = [0.0] * len(self._nbytes)
        left, rate, since = list(self._nbytes), [0.0] * len(ends), [0.0] * len(ends)
        active: list[set[int]] = [set() for _ in self._capacity]
        version = [0] * len(left)
        events = [(self._waits_s[flow], flow, -1) for flow, count in enumerate(waits_for) if not count]
        heapq.heapify(events)

        def share(flow: int, now: float) -> None:
            """Let a flow go on at the rate that its ports have for it from now on."""
            new = min(self._capacity[port] / len(active[port]) for port in self._ports[flow])
            if new == rate[flow]:
                return
            left[flow] -= rate[flow] * (now - since[flow])
            rate[flow], since[flow] = new, now
            version[flow] += 1
            heapq.heappush(events, (now + max(left[flow], 0.0) / new, flow, version[flow]))

        while events:
            now, flow, of_version = heapq.heappop(events)
            begins = of_version == -1
            if not begins and of_version != version[flow]:
                continue
            touched = set[int]()
            for port in self._ports[flow]:
                if begins and left[flow]:
                    active[port].add(flow)
                else:
                    active[port].discard(flow)
                touched |= active[port]
            if begins and left[flow]:
                since[flow] = now
                touched.add(flow)
            else:
                version[flow] += 1
                ends[flow] = now
                for other in followers[flow]:
                    waits_for[other] -= 1
                    if not waits_for[other]:
                        heapq.heappush(events, (now + self._waits_s[other], other, -1))
            for other in sorted(touched):
                share(other, now)
        assert not any(waits_for), "no flow waits for one that never ends"
        return ends
