#!/bin/busybox sh
# Process 1 of a guest that has disks as devices of the nbd driver. It has the program in its first files, and the images on a
# disk of the host's, where they stay for it to look at. What it finds it says on its console, in lines that begin with
# "guest: ". Where anything fails it ends, and the kernel panics.
set -e
/bin/busybox mkdir -p /bin /dev /proc /sys /tmp /host /mnt /var/lock
/bin/busybox --install -s /bin 2> /dev/null || true # mke2fs is there already, and stays
export PATH=/bin

say() {
    echo "guest: $*"
}

# Starts a server with these arguments; its block device is there when this returns.
serve() {
    : > /tmp/said
    vellum serve --threads 2 --control /tmp/control "$@" 2> /tmp/said &
    server=$!
    waited=0
    until grep -q '^serving /dev/nbd' /tmp/said; do
        [ "$waited" -lt 600 ] || cat /tmp/said
        [ "$waited" -lt 600 ]
        kill -0 "$server" 2> /dev/null || { cat /tmp/said; false; }
        waited=$((waited + 1))
        usleep 100000
    done
    disk=$(sed -n 's/^serving \(.dev.nbd.*\)/\1/p' /tmp/said | head -n 1)
}

# Waits until the device has no server.
freed() {
    waited=0
    while [ -e "/sys/block/$1/pid" ] && [ "$waited" -lt 300 ]; do
        waited=$((waited + 1))
        usleep 100000
    done
    if [ -e "/sys/block/$1/pid" ]; then echo taken; else echo free; fi
}

# A server whose last device is gone may have ended by itself.
stop() {
    kill -TERM "$server" 2> /dev/null || true
    code=0
    wait "$server" || code=$?
}

sum() {
    say "sum $1 $2 $(sha256sum < "$2" | cut -d ' ' -f 1)"
}

# Files of some pages of noise each, synced one by one, until the disk goes away.
pages() {
    n=0
    while n=$((n + 1)); do
        dd if=/host/noise "of=/mnt/data/pages.$n" bs=4096 skip="$n" count=$((1 + n % 17)) conv=fsync status=none || return 0
        echo "$n" > /tmp/settled.new
        mv /tmp/settled.new /tmp/settled
    done
}

refused() {
    code=0
    "$@" > /tmp/refused 2>&1 || code=$?
    say "refused $code $(tr '\n' ' ' < /tmp/refused)"
}

mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs tmp /tmp
for module in $(cat /modules/order); do
    insmod "/modules/$module"
done
until [ -b /dev/vda ] && [ -b /dev/nbd3 ]; do usleep 100000; done
mount -t ext4 /dev/vda /host
ln -s vellum /bin/qemu-nbd
say "booted $(uname -r)"

# An ordinary life.
serve /host/disk.qcow2 --nbd-device /dev/nbd0
queue=/sys/block/nbd0/queue
say "device $disk $(cat /sys/block/nbd0/size) $(cat $queue/write_cache) $([ "$(cat $queue/discard_max_bytes)" -gt 0 ] && echo 1)"
say "listed $(vellum client list --control /tmp/control | grep -o '/dev/nbd0' | head -n 1)"
refused vellum serve -q -f raw /host/noise -r --nbd-device /dev/nbd0
refused vellum serve -q -f raw /host/noise -r --nbd-device /dev/nbd99
refused vellum serve -q -f raw /host/noise -r --nbd-device /dev/vda
refused vellum client disconnect --device /dev/nbd1
/bin/mke2fs -q -F -t ext4 -E lazy_itable_init=0 "$disk" > /tmp/mke2fs 2>&1 || { cat /tmp/mke2fs; false; }
mount -t ext4 "$disk" /mnt
mkdir /mnt/data
cp /host/noise /mnt/data/noise
seq 100000 > /mnt/data/numbers
sync
rm /mnt/data/numbers
fstrim /mnt
echo 3 > /proc/sys/vm/drop_caches
sum disk /mnt/data/noise
umount /mnt
# What the page cache has of the device, the server's end writes.
dd if=/host/noise of="$disk" bs=512 count=1 conv=notrunc status=none seek=131071
stop
say "ended $code $(freed nbd0)"

# A paused disk is resumed by the end of its server: what the page cache has is written, and the device goes away. The page is in
# the cache before, and the device is kept open, so that a part of it is written without the disk.
serve /host/disk.qcow2 --nbd-device /dev/nbd0
exec 3< "$disk"
dd if="$disk" bs=4096 skip=16383 count=1 of=/dev/null status=none
vellum pause --control /tmp/control > /dev/null
dd if=/host/noise of="$disk" bs=512 count=1 conv=notrunc status=none seek=131070
stop
exec 3<&-
say "paused $code $(freed nbd0)"
serve /host/disk.qcow2 --nbd-device /dev/nbd0
dd if="$disk" bs=512 skip=131070 count=1 status=none | cmp -n 512 - /host/noise
# Another program takes the device away meanwhile, and does not wait for the disk.
vellum pause --control /tmp/control > /dev/null
code=0
vellum client disconnect --device "$disk" || code=$?
taken=$code
free=$(freed nbd0)
stop
say "taken away $taken $free $(grep -c 'while its disk was paused' /tmp/said)"

# Killed in the middle of writes; the next one finds what was synced. The kernel says a lot then.
serve /host/disk.qcow2 --nbd-device /dev/nbd0
dd if="$disk" bs=512 skip=131071 count=1 status=none | cmp -n 512 - /host/noise
mount -t ext4 "$disk" /mnt
echo 0 > /tmp/settled
echo 1 > /proc/sys/kernel/printk
pages 2> /dev/null &
writer=$!
until [ "$(cat /tmp/settled)" -ge 12 ]; do usleep 20000; done
kill -KILL "$server"
wait "$server" || true
wait "$writer"
umount /mnt
say "killed $(freed nbd0)"
echo 4 > /proc/sys/kernel/printk
settled=$(cat /tmp/settled)
serve /host/disk.qcow2 --nbd-device /dev/nbd0
mount -t ext4 "$disk" /mnt
n=0
while [ "$n" -lt "$settled" ]; do
    n=$((n + 1))
    sum disk "/mnt/data/pages.$n"
done
say "settled $settled"
umount /mnt
stop
freed nbd0 > /dev/null
serve -r /host/disk.qcow2 --nbd-device /dev/nbd0
say "read-only $(cat /sys/block/nbd0/ro)"
stop

# As scripts for QEMU's program have it.
code=0
qemu-nbd -f qcow2 --discard=unmap -c /dev/nbd3 /host/other.qcow2 || code=$?
say "connected /dev/nbd3 $code"
/bin/mke2fs -q -F -t ext4 -E lazy_itable_init=0 /dev/nbd3 > /tmp/mke2fs 2>&1 || { cat /tmp/mke2fs; false; }
mount -t ext4 /dev/nbd3 /mnt
mkdir /mnt/data
cp /host/noise /mnt/data/noise
sum other /mnt/data/noise
umount /mnt
say "disconnected $(qemu-nbd -d /dev/nbd3)"
waited=0
while pidof vellum qemu-nbd > /dev/null && [ "$waited" -lt 300 ]; do
    waited=$((waited + 1))
    usleep 100000
done
pidof vellum qemu-nbd > /dev/null || say "gone with its device"

say "traces $(dmesg | grep -c -E 'Call Trace|WARNING:|BUG:' || true)"
umount /host
say done
sleep 1
poweroff -f
