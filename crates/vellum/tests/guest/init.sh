#!/bin/busybox sh
# Process 1 of the guest, from the served disk. The kernel's command line says which story it is to play. It tells what
# it did on the console, in lines that begin with "guest: ". Where anything fails it ends, and the kernel panics.
set -e
export PATH=/bin

say() {
    echo "guest: $*"
}

# The kernel forgets what it has read, so that the disk is asked again.
forget() {
    echo 3 > /proc/sys/vm/drop_caches
}

sum() {
    for file in "$@"; do
        say "sum $file $(sha256sum < "$file" | cut -d ' ' -f 1)"
    done
}

# Everything is on the disk when this returns. `sync` does not tell of errors; an fsync after it does.
settle() {
    sync
    echo "$*" > /data/settled.new
    dd if=/data/settled.new of=/data/settled conv=fsync status=none
}

end() {
    mount -o remount,ro /
    say done
    sleep 1
    poweroff -f
}

# Files of some pages of noise each; every fourth time all are settled. Goes on until it is killed, or until $1.
pages() {
    n=0
    while [ "$n" -lt "$1" ]; do
        n=$((n + 1))
        dd if=/srv/noise of="/data/pages.$round.$n" bs=4096 skip="$n" count=$((1 + n % 17)) status=none
        if [ $((n % 4)) = 0 ]; then
            settle "$round.$n"
            say "settled $n"
        fi
    done
}

# A log whose every record is synced by itself. Each log has another page of the noise first.
keep_log() {
    for n in $(seq 0 31); do
        dd if=/srv/noise of="/data/log.$1" bs=4096 count=1 skip=$(($1 + n)) seek="$n" conv=notrunc,fsync status=none
    done
}

# Makes the disk busy for ever: files come, are synced, and go.
churn() {
    while true; do
        keep_log 1
        dd if=/srv/noise of=/data/churn bs=65536 conv=fsync status=none
        rm /data/churn /data/log.1
    done
}

write() {
    sum "/boot/vmlinuz-$(uname -r)" /srv/noise
    cp /srv/noise /data/copy
    cat /srv/noise /srv/rewritten /srv/noise > /data/joined
    seq 1 100000 > /data/numbers
    head -c 3000000 /dev/urandom > /data/random
    dd if=/srv/noise of=/srv/rewritten bs=1000 skip=7 seek=333 count=1001 conv=notrunc status=none
    echo "The guest was here." >> /etc/motd
    rm /srv/deleted
    mkdir /data/many
    for n in $(seq 1 200); do
        echo "file $n" > "/data/many/$n"
    done
    settle written
    for log in 1 2 3 4; do
        keep_log "$log" &
    done
    wait
    settle logged
    forget
    sum /data/copy /data/joined /data/numbers /data/random /srv/rewritten /data/log.*
    fstrim /
    forget
    sum /data/random /srv/noise
}

[ -e /bin/sh ] || /bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
# From here on the kernel tells only of errors.
dmesg -n 4
say "booted $(uname -r)"
say "queues $(ls /sys/block/vda/mq | wc -l)"
case "$story" in
write)
    write
    ;;
until-killed)
    # Places on the disk are given back as soon as files are removed, and taken again.
    mount -o remount,discard /
    churn &
    pages 100000
    ;;
verify)
    sum /data/pages.*
    ;;
some-pages)
    pages 60
    ;;
grows)
    # The disk becomes larger under it. What is behind the old end is there, and the rest is as it was.
    before=$(cat /sys/block/vda/size)
    say "size $before"
    pages 12
    while [ "$(cat /sys/block/vda/size)" = "$before" ]; do
        sleep 1
    done
    now=$(cat /sys/block/vda/size)
    say "size $now"
    dd if=/srv/noise of=/dev/vda bs=512 seek=$((now - 64)) count=64 conv=notrunc,fsync status=none
    forget
    say "behind $(dd if=/dev/vda bs=512 skip=$((now - 64)) status=none | sha256sum | cut -d ' ' -f 1)"
    pages 24
    ;;
pages-and-reboot)
    # Twice, with a boot of the machine in between; places are given back and taken again all the time.
    mount -o remount,discard /
    if [ ! -e /data/rebooted ]; then
        pages 60
        touch /data/rebooted
        settle rebooting
        sum /data/pages.1.*
        mount -o remount,ro /
        say rebooting
        reboot -f
    fi
    round=2
    sum /data/pages.1.*
    pages 60
    forget
    sum /data/pages.2.*
    fstrim /
    ;;
esac
end
