#!/bin/sh
# Starts a Ceph cluster of one monitor and one OSD, which keeps everything in memory, for tests.
#
#   ceph-cluster.sh DIR PORT      the cluster is in DIR, the monitor listens at 127.0.0.1:PORT
#
# Debian: ceph-mon ceph-osd ceph-common. The configuration, for CEPH_CONF, is DIR/ceph.conf; there is a pool `disks` and a
# user client.reader, which may only read. The daemons are children of this script: it waits for them, and ends them when
# it is ended (TERM). It prints `ready` once images can be made, and fails where that takes more than minutes.
set -eu
dir=$1 port=$2
mkdir -p "$dir/mon" "$dir/osd"
fsid=$(cat /proc/sys/kernel/random/uuid)
cat >"$dir/ceph.conf" <<EOF
[global]
fsid = $fsid
mon host = [v2:127.0.0.1:$port/0]
public network = 127.0.0.0/8
keyring = $dir/keyring
run dir = $dir
admin socket = $dir/\$name.\$pid.asok
log file = $dir/\$name.log
pid file = $dir/\$name.pid
mon data = $dir/mon
osd data = $dir/osd
osd objectstore = memstore
memstore device bytes = 1073741824
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd crush chooseleaf type = 0
osd class dir = $(dirname "$(find /usr/lib -name libcls_rbd.so 2>/dev/null | head -1)")
mon allow pool size one = true
mon data avail crit = 1
mon data avail warn = 1
ms bind msgr1 = false
EOF
export CEPH_CONF="$dir/ceph.conf"
daemons=
end() { kill $daemons 2>/dev/null || true; wait; }
trap end EXIT
trap 'exit 0' TERM INT
ceph-authtool --create-keyring "$dir/keyring" --gen-key -n mon. --cap mon 'allow *' >>"$dir/log"
ceph-authtool "$dir/keyring" --gen-key -n client.admin --cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *' >>"$dir/log"
monmaptool --create --fsid "$fsid" --addv a "[v2:127.0.0.1:$port/0]" "$dir/monmap" >>"$dir/log"
ceph-mon -c "$CEPH_CONF" -i a --mkfs --monmap "$dir/monmap" --keyring "$dir/keyring"
ceph-mon -c "$CEPH_CONF" -i a -f >>"$dir/mon.out" 2>&1 &
daemons="$daemons $!"
uuid=$(cat /proc/sys/kernel/random/uuid)
timeout 60 ceph --connect-timeout 60 osd new "$uuid" >/dev/null
timeout 60 ceph auth get-or-create osd.0 mon 'allow profile osd' osd 'allow *' -o "$dir/osd/keyring" 2>>"$dir/log"
ceph-osd -c "$CEPH_CONF" -i 0 --mkfs --osd-uuid "$uuid" --keyring "$dir/osd/keyring" >>"$dir/osd.out" 2>&1
ceph-osd -c "$CEPH_CONF" -i 0 -f --keyring "$dir/osd/keyring" >>"$dir/osd.out" 2>&1 &
daemons="$daemons $!"
timeout 60 ceph osd pool create disks 8 >/dev/null 2>&1
timeout 60 ceph auth get-or-create client.reader mon 'profile rbd' osd 'profile rbd-read-only' >>"$dir/keyring"
timeout 100 rbd pool init disks
echo ready
wait
