"""The line that opens the port of a worker to another machine, for the firewall that it has."""

from __future__ import annotations

import shutil

# Programs that set up a firewall, the ones that use others first, and what opens a port with them.
TOOLS = {
    "ufw": "ufw allow from {source} to any port {port} proto {protocol}",
    "firewall-cmd": "firewall-cmd --add-rich-rule='rule family=ipv4 source address={source} "
    "port port={port} protocol={protocol} accept'",
    "nft": "nft insert rule inet filter input ip saddr {source} {protocol} dport {port} accept",
    "iptables": "iptables -I INPUT -s {source} -p {protocol} --dport {port} -j ACCEPT",
}


def tool() -> str:
    """The name of the first of `TOOLS` that this machine has; "" if it has none."""
    return next((name for name in TOOLS if shutil.which(name)), "")


def opening(tool: str, source: str, port: str, protocol: str) -> str:
    """The command for the ``protocol``, ``tcp`` or ``udp``; that of ``ufw`` for an unknown
    ``tool``."""
    line = TOOLS.get(tool, TOOLS["ufw"])
    return line.format(source=source or "OTHER_HOST", port=port, protocol=protocol)
