#!/bin/bash
# Process 1 of the guest, on the host's files: kernel file systems, three soft-RoCE devices, one of them without a link, then the program, then power off.
# The last two arguments: the command line to run, the folder to run it in; the kernel puts words of its own before them.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mountpoint -q /dev || mount -t devtmpfs dev /dev
mkdir -p /dev/shm /dev/pts
mount -t tmpfs -o size=2g shm /dev/shm
mount -t devpts pts /dev/pts
mount -t tmpfs run /run
[ -e /dev/fd ] || ln -s /proc/self/fd /dev/fd
hostname guest
ulimit -l unlimited
ulimit -n 65536
ulimit -c 0
ip link set lo up
# Both ends of one veth pair stay in this namespace, the only one that soft-RoCE knows: a packet from 10.77.0.1 to
# 10.77.0.2 goes over the wire and comes in with a source address of our own, which the kernel must accept.
sysctl -qw net.ipv4.conf.all.accept_local=1 net.ipv4.conf.default.accept_local=1 \
  net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.default.rp_filter=0 net.ipv4.conf.all.arp_ignore=1
ip link add eth0 mtu 4200 type veth peer name eth1 mtu 4200
for number in 0 1; do
  ip address add "10.77.0.$((number + 1))/24" dev "eth$number"
  ip link set "eth$number" up
  rdma link add "mlx5_$number" type rxe netdev "eth$number"
done
# A third one without a link.
ip link add eth2 mtu 4200 type dummy
rdma link add mlx5_2 type rxe netdev eth2
cd "${@: -1}" && bash -c "${*: -2:1}"
echo "EXIT $?"
sync
echo o >/proc/sysrq-trigger
while :; do :; done # process 1 must not end before the power does
