"""RDMA devices of this host. The engine falls back to TCP without a word if it finds none, so they are chosen here."""

from __future__ import annotations

from pathlib import Path

from transfer_queue.errors import StartError

__all__ = ["choose_devices"]

SYSFS = Path("/sys/class/infiniband")


def choose_devices(device_name: str, sysfs: Path = SYSFS) -> str:
    """The comma-separated list that the engine takes: the devices named, or with ``auto`` all that have an active port.

    Raises StartError that names the device and its state.
    """
    states = {path.name: _states(path) for path in sorted(sysfs.glob("*"))} if sysfs.is_dir() else {}
    active = [name for name, ports in states.items() if any("ACTIVE" in port for port in ports)]
    if device_name == "auto":
        if not active:
            found = ", ".join(f"{name} ({'/'.join(ports) or 'no port'})" for name, ports in states.items())
            raise StartError(
                f"no InfiniBand device found under {sysfs} with an active port{': ' + found if found else ''}; "
                "run on a host with RDMA or set protocol: tcp"
            )
        return ",".join(active)
    wanted = [name.strip() for name in device_name.split(",") if name.strip()]
    for name in wanted:
        if name not in states:
            raise StartError(
                f"deviceName: no InfiniBand device {name!r} under {sysfs}; present: {', '.join(states) or 'none'}"
            )
        if name not in active:
            raise StartError(f"deviceName: the port of {name} is not active ({'/'.join(states[name]) or 'no port'})")
    if not wanted:
        raise StartError("deviceName is empty; write auto or a comma-separated list of devices")
    return ",".join(wanted)


def _states(device: Path) -> list[str]:
    states = []
    for port in sorted(device.glob("ports/*/state")):
        try:
            states.append(port.read_text().strip())
        except OSError:  # the device went away meanwhile
            states.append("unreadable")
    return states
