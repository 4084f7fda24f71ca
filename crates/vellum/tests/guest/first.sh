#!/bin/busybox sh
# The guest's first program, from the archive that the kernel unpacks: finds the disk, and goes there.
set -e
busybox=/bin/busybox
$busybox mount -t devtmpfs dev /dev
for module in $($busybox cat /modules/order); do
    $busybox insmod "/modules/$module"
done
waited=0
until [ -b /dev/vda ]; do
    [ "$waited" -lt 600 ]
    waited=$((waited + 1))
    $busybox usleep 100000
done
$busybox mount -t ext4 /dev/vda /root
$busybox mount -t devtmpfs dev /root/dev
exec $busybox switch_root /root /sbin/init
