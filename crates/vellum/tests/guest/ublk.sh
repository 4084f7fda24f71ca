#!/bin/busybox sh
# Process 1 of a guest that serves disks to itself. It has the program in its first files, and the images on a disk of the
# host's, where they stay for it to look at. What it finds it says on its console, in lines that begin with "guest: ". Where
# anything fails it ends, and the kernel panics.
set -e
/bin/busybox mkdir -p /bin /dev /proc /sys /tmp /host /mnt
/bin/busybox --install -s /bin 2> /dev/null || true # mke2fs is there already, and stays
export PATH=/bin

say() {
    echo "guest: $*"
}

# Starts a server with these arguments; its block device is there when this returns.
serve() {
    : > /tmp/said
    vellum serve --threads 2 --stats-json /tmp/stats "$@" 2> /tmp/said &
    server=$!
    waited=0
    until grep -q '^serving /dev/ublkb' /tmp/said; do
        [ "$waited" -lt 600 ] || cat /tmp/said
        [ "$waited" -lt 600 ]
        kill -0 "$server" 2> /dev/null || { cat /tmp/said; false; }
        waited=$((waited + 1))
        usleep 100000
    done
    disk=$(sed -n 's/^serving \(.dev.ublkb.*\)/\1/p' /tmp/said | head -n 1)
    [ -b "$disk" ]
}

# Ends it in good order.
stop() {
    kill -TERM "$server"
    code=0
    wait "$server" || code=$?
    say "ended $1 $code $(ls /dev | grep -c 'ublk[bc]')"
    say "stats $1 $(tr -d ' \n' < /tmp/stats)"
}

sum() {
    say "sum $1 $2 $(sha256sum < "$2" | cut -d ' ' -f 1)"
}

# The kernel forgets what it has read, so that the disk is asked again.
forget() {
    echo 3 > /proc/sys/vm/drop_caches
}

# Writes noise past the page cache, from byte $2 * $1 of it to byte $3 * $1 of the disk, $4 blocks of $1; and reads it back.
odd() {
    dd if=/host/noise of="$disk" bs="$1" skip="$2" seek="$3" count="$4" oflag=direct conv=notrunc status=none
    forget
    dd if="$disk" bs="$1" skip="$3" count="$4" iflag=direct status=none > /tmp/read
    dd if=/host/noise bs="$1" skip="$2" count="$4" status=none | cmp - /tmp/read
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

# All of it with one image: $1 its file, $2 how its device is asked for.
story() {
    serve "/host/$1" --ublk "$2"
    block=/sys/block/${disk#/dev/}
    say "device $1 $disk $(cat "$block/size") $(ls "$block/mq" | wc -l) $(cat "$block/queue/fua") $(cat "$block/queue/write_cache")"

    odd 512 3 70001 1
    odd 512 5 70003 99
    odd 4096 1 12345 100
    odd 1048576 0 7 3
    odd 65536 2 500 20
    blkdiscard -o 1048576 -l 8388608 "$disk"
    odd 65536 1 30 7

    /bin/mke2fs -q -F -t ext4 -E lazy_itable_init=0 "$disk" > /tmp/mke2fs 2>&1 || { cat /tmp/mke2fs; false; }
    mount -t ext4 "$disk" /mnt
    mkdir /mnt/data
    cp /host/noise /mnt/data/noise
    cp /host/noise /mnt/data/deleted
    seq 100000 > /mnt/data/numbers
    sync
    rm /mnt/data/deleted
    dd if=/host/noise of=/mnt/data/noise bs=1000 skip=7 seek=333 count=1001 conv=notrunc,fsync status=none
    fstrim /mnt
    forget
    sum "$1" /mnt/data/noise
    sum "$1" /mnt/data/numbers
    umount /mnt
    stop "$1"

    # Killed in the middle of writes. The kernel says a lot then.
    serve "/host/$1" --ublk "$2"
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
    echo 4 > /proc/sys/kernel/printk
    settled=$(cat /tmp/settled)

    # The next one finds what the dead one left.
    serve "/host/$1" --ublk "$2"
    mount -t ext4 "$disk" /mnt
    n=0
    while [ "$n" -lt "$settled" ]; do
        n=$((n + 1))
        sum "$1" "/mnt/data/pages.$n"
    done
    say "settled $1 $settled"
    umount /mnt
    stop "$1"
}

# A device that outlives its servers: those who use it see pauses.
keep() {
    serve "/host/$1" --ublk 5 --ublk-keep
    say "kept $1 $(cat /sys/block/ublkb5/queue/write_cache)"
    mount -t ext4 "$disk" /mnt
    rm /mnt/data/pages.*
    echo 0 > /tmp/settled
    pages &
    writer=$!
    for death in 8 16 24; do
        until [ "$(cat /tmp/settled)" -ge "$death" ]; do usleep 20000; done
        kill -KILL "$server"
        wait "$server" || true
        serve "/host/$1" --ublk 5 --ublk-keep
    done
    until [ "$(cat /tmp/settled)" -ge 32 ]; do usleep 20000; done
    kill "$writer"
    wait "$writer" || true
    settled=$(cat /tmp/settled)
    # What was answered is there, whether it was flushed or not.
    dd if=/host/noise of=/mnt/data/direct bs=65536 oflag=direct status=none
    kill -KILL "$server"
    wait "$server" || true
    serve "/host/$1" --ublk 5 --ublk-keep
    forget
    n=0
    while [ "$n" -lt "$settled" ]; do
        n=$((n + 1))
        sum "$1" "/mnt/data/pages.$n"
    done
    sum "$1" /mnt/data/direct
    say "kept-settled $1 $settled"

    # A server that is ended leaves the device to the next one, too, and what the kernel has not written yet. Meanwhile the disk is
    # made larger: the device may be smaller.
    dd if=/host/noise of=/mnt/data/cached bs=65536 status=none
    kill -TERM "$server"
    code=0
    wait "$server" || code=$?
    say "left $1 $code $(ls /dev | grep -c 'ublkb5')"
    vellum resize -q "/host/$1" +1M
    serve "/host/$1" --ublk 5 --ublk-keep
    sync
    forget
    sum "$1" /mnt/data/cached
    if [ "$(cat /sys/block/ublkb5/size)" -eq 133120 ] || grep -q 'ublkb5 keeps its size' /tmp/said; then say "smaller $1"; fi

    # Of two devices one is taken over and the other cannot be made: the first waits again, and its users have seen nothing.
    kill -KILL "$server"
    wait "$server" || true
    serve "/host/$2" --ublk 6
    sleep 10000 < /dev/ublkb6 &
    user=$!
    until [ "$(readlink "/proc/$user/fd/0")" = /dev/ublkb6 ]; do usleep 20000; done
    kill -KILL "$server"
    wait "$server" || true
    dd if=/host/noise of=/mnt/data/patient bs=65536 conv=fsync status=none &
    writer=$!
    both="--export a=/host/$1 --export b=/host/$2 --ublk a=5 --ublk b=6 --ublk-keep"
    code=0
    vellum serve --threads 2 $both 2> /tmp/refused || code=$?
    say "refused $code $(tr '\n' ' ' < /tmp/refused)"
    # As it does when the other is seen to be of another image before anything is touched.
    code=0
    vellum serve --threads 2 --export "a=/host/$1" --export "b=/host/$2" --ublk b=6 --ublk a=6 --ublk-keep 2> /tmp/refused || code=$?
    say "refused $code $(tr '\n' ' ' < /tmp/refused)"
    code=0
    vellum serve --threads 2 --export "b=/host/$2" --ublk 5 --ublk-keep 2> /tmp/refused || code=$?
    say "refused $code $(tr '\n' ' ' < /tmp/refused)"
    kill "$user"
    wait "$user" || true
    serve $both
    wait "$writer"
    forget
    sum "$1" /mnt/data/patient
    say "both $(grep -c '^serving /dev/ublkb' /tmp/said)"
    disk=/dev/ublkb5
    umount /mnt
    # Killed once more, and then not wanted any more: they are taken away.
    kill -KILL "$server"
    wait "$server" || true
    serve "/host/$2" --ublk 6
    stop "$2"
    serve "/host/$1" --ublk 5
    say "not-kept $1 $(cat /sys/block/ublkb5/queue/write_cache)"
    stop "$1"
}

# All that a queue holds is with a server that is killed: the kernel hears of that from a timer, and the next server waits for it.
busy() {
    serve -f raw "/host/$1" --ublk 7 --ublk-keep --queues 1 --control /tmp/control
    echo none > /sys/block/ublkb7/queue/scheduler
    # Longer than a server waits for one that lives; the kernel's own is 30 seconds.
    # It counts from the first of the writes below, which a busy host begins slowly.
    echo 20000 > /sys/block/ublkb7/queue/io_timeout
    vellum pause --control /tmp/control > /dev/null
    writers=
    n=0
    while [ "$n" -lt 140 ]; do
        dd if=/host/noise of="$disk" bs=4096 skip="$n" seek=$((n * 2)) count=1 oflag=direct conv=notrunc status=none &
        writers="$writers $!"
        n=$((n + 1))
    done
    until [ "$(awk '{ print $2 }' /sys/block/ublkb7/inflight)" -ge 128 ]; do usleep 20000; done
    kill -KILL "$server"
    wait "$server" || true
    serve -f raw "/host/$1" --ublk 7 --ublk-keep
    wait $writers
    forget
    while [ "$n" -gt 0 ]; do
        n=$((n - 1))
        dd if="$disk" bs=4096 skip=$((n * 2)) count=1 iflag=direct status=none
    done > /tmp/read
    while [ "$n" -lt 140 ]; do
        n=$((n + 1))
        dd if=/host/noise bs=4096 skip=$((140 - n)) count=1 status=none
    done | cmp - /tmp/read
    say "busy $(grep -c 'has not released the device yet' /tmp/said)"
    kill -KILL "$server"
    wait "$server" || true
    serve -f raw "/host/$1" --ublk 7
    stop "$1"
}

mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs tmp /tmp
for module in $(cat /modules/order); do
    insmod "/modules/$module"
done
until [ -b /dev/vda ]; do usleep 100000; done
mount -t ext4 /dev/vda /host
say "booted $(uname -r)"

story journaled.qcow2 0
story native.vlm 3

keep journaled.qcow2 native.vlm

# What is refused.
serve /host/native.vlm --ublk auto
say "auto $disk"
refused() {
    code=0
    vellum serve -f raw /host/noise "$@" 2> /tmp/refused || code=$?
    say "refused $code $(cat /tmp/refused)"
}
refused --ublk "${disk#/dev/ublkb}"
refused --ublk 9 --io threads
stop native.vlm
vellum create -q -f raw /host/raw 4M
# A kernel that cannot resize the device is not asked to, and one that can does.
serve -f raw /host/raw --ublk 4 --queues 1 --control /tmp/control
vellum resize -q --control /tmp/control +1M
if [ "$(cat /sys/block/ublkb4/size)" -eq 10240 ] || grep -q 'ublkb4 keeps its size' /tmp/said; then say "resized"; fi
dd if="$disk" of=/dev/null bs=1M count=4 iflag=direct status=none
stop raw
serve -r -f raw /host/raw --ublk 4 --queues 1
say "read-only $(cat /sys/block/ublkb4/ro) $(ls /sys/block/ublkb4/mq | wc -l)"
stop raw

busy raw

say "traces $(dmesg | grep -c -E 'Call Trace|WARNING:|BUG:' || true)"
umount /host
say done
sleep 1
poweroff -f
