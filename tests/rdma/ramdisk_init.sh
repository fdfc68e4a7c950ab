#!/bin/busybox sh
# First program of the guest: load the modules, put a tmpfs over the host's root, go on there.
box=/bin/busybox
$box mount -t proc proc /proc
$box mount -t sysfs sysfs /sys
$box mount -t devtmpfs dev /dev
while read -r module; do
  $box insmod "/m/$module" || echo "module $module does not load"
done </m/order
$box mount -t 9p -o trans=virtio,version=9p2000.L,msize=524288,cache=loose,ro hostroot /low || $box poweroff -f
$box mount -t tmpfs -o size=50% top /top && $box mkdir /top/upper /top/work || $box poweroff -f
$box mount -t overlay -o lowerdir=/low,upperdir=/top/upper,workdir=/top/work overlay /new || $box poweroff -f
for word in $($box cat /proc/cmdline); do
  case $word in tq.init=*) next=${word#tq.init=} ;; esac
done
$box umount /proc /sys /dev
exec $box switch_root /new /bin/bash "$next" "$@"
