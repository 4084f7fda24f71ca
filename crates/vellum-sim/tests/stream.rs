//! Connections in the world.

mod common;

use std::time::Duration;

use vellum_core::{Buffer, ByteStream, ErrorKind, Random, Result};
use vellum_sim::{SimStream, StreamOptions, World, stream_pair};

fn pair(world: &World) -> (SimStream, SimStream) {
    stream_pair(world, &StreamOptions::default())
}

async fn read_all(stream: &SimStream, chunk: usize) -> Result<Vec<u8>> {
    let mut all = Vec::new();
    loop {
        let (buffer, count) = stream.read(Buffer::zeroed(chunk)).await?;
        if count == 0 {
            return Ok(all);
        }
        all.extend_from_slice(&buffer.to_vec()[..count]);
    }
}

#[test]
fn bytes_arrive_in_order_however_small_the_pipe_and_the_fragments() {
    for seed in 0..30 {
        let world = World::shuffled(seed);
        let options = StreamOptions {
            capacity: 1 + usize::try_from(seed).expect("small") * 37,
            fragment: seed % 2 == 0,
            delay: Duration::ZERO..=Duration::from_micros(seed % 3 * 40),
        };
        let (client, server) = stream_pair(&world, &options);
        let mut sent = vec![0; 10_000];
        Random::from_seed(seed).fill(&mut sent);
        let mut data = Buffer::copy_of(&sent[..3_000]);
        data.append(Buffer::copy_of(&sent[3_000..]));
        let echo = world.spawn(async move {
            let got = read_all(&server, 777).await?;
            server.write_all(Buffer::copy_of(&got)).await?;
            Ok::<_, vellum_core::Error>(got)
        });
        let got = world.run(async {
            client.write_all(data).await?;
            // The peer reads to the end; its later answer has no reader.
            client.shutdown();
            let failed = echo.await;
            Ok::<_, vellum_core::Error>(failed.err().map(|error| error.kind()))
        });
        assert_eq!(got.expect("the writing succeeds"), Some(ErrorKind::Io), "seed {seed}");
        let (client, server) = stream_pair(&world, &options);
        let reader = world.spawn(async move { read_all(&server, 777).await });
        world.run(async {
            client.write_all(Buffer::copy_of(&sent)).await.expect("a write succeeds");
            drop(client);
            assert!(reader.await.expect("a read succeeds") == sent, "seed {seed}");
        });
    }
}

#[test]
fn fragments_differ_from_seed_to_seed() {
    let sizes = |seed| {
        let world = World::new(seed);
        let options = StreamOptions { fragment: true, ..StreamOptions::default() };
        let (one, other) = stream_pair(&world, &options);
        world.run(async {
            one.write_all(Buffer::zeroed(1000)).await.expect("a write succeeds");
            other.read(Buffer::zeroed(1000)).await.expect("a read succeeds").1
        })
    };
    let all: std::collections::BTreeSet<usize> = (0..20).map(sizes).collect();
    assert!(all.len() > 15);
    assert_eq!(sizes(3), sizes(3));
}

#[test]
fn both_directions_go_on_at_once_and_a_full_pipe_makes_the_writer_wait() {
    let world = World::new(1);
    let (one, other) = stream_pair(&world, &StreamOptions { capacity: 100, ..StreamOptions::default() });
    let writer = world.spawn(async move {
        one.write_all(Buffer::copy_of(&[1; 250])).await.expect("a write succeeds");
        let (answer, count) = one.read(Buffer::zeroed(10)).await.expect("a read succeeds");
        (answer.to_vec()[0], count)
    });
    world.run(async {
        world.yield_now().await;
        assert!(!writer.is_finished());
        other.write_all(Buffer::copy_of(&[9])).await.expect("the other way is free");
        let mut got = 0;
        while got < 250 {
            got += other.read(Buffer::zeroed(1000)).await.expect("a read succeeds").1;
        }
        assert_eq!(writer.await, (9, 1));
    });
}

#[test]
fn shutdown_ends_waiting_reads_on_both_sides_and_writes_fail() {
    let world = World::new(1);
    let (one, other) = pair(&world);
    world.run(async {
        one.write_all(Buffer::copy_of(b"last words")).await.expect("a write succeeds");
        let one = std::rc::Rc::new(one);
        let waiting = world.spawn({
            let one = one.clone();
            async move { one.read(Buffer::zeroed(10)).await.expect("a read succeeds").1 }
        });
        world.yield_now().await;
        one.shutdown();
        one.shutdown();
        assert_eq!(waiting.await, 0);
        assert_eq!(read_all(&other, 4).await.expect("a read succeeds"), b"last words");
        let kind = other.write_all(Buffer::zeroed(1)).await.expect_err("nobody reads").kind();
        assert_eq!(kind, ErrorKind::Io);
        let kind = one.write_all(Buffer::zeroed(1)).await.expect_err("it was shut down").kind();
        assert_eq!(kind, ErrorKind::Io);
    });
}

#[test]
fn a_reset_loses_what_is_on_its_way_and_fails_both_ends() {
    let world = World::new(1);
    let (one, other) = pair(&world);
    world.run(async {
        one.write_all(Buffer::zeroed(10)).await.expect("a write succeeds");
        let waiting = world.spawn({
            async move {
                let first = one.read(Buffer::zeroed(10)).await.map(|(_, count)| count);
                (first, one.write_all(Buffer::zeroed(1)).await)
            }
        });
        world.yield_now().await;
        other.reset();
        let (read, write) = waiting.await;
        assert_eq!(read.expect_err("reset").kind(), ErrorKind::Io);
        assert_eq!(write.expect_err("reset").kind(), ErrorKind::Io);
        assert!(other.read(Buffer::zeroed(10)).await.is_err());
    });
}

#[test]
fn bytes_take_their_time() {
    let world = World::new(1);
    let ten = Duration::from_millis(10);
    let (one, other) = stream_pair(&world, &StreamOptions { delay: ten..=ten, ..StreamOptions::default() });
    world.run(async {
        one.write_all(Buffer::zeroed(10)).await.expect("a write succeeds");
        assert_eq!(world.now(), Duration::ZERO, "sending does not wait for arrival");
        assert_eq!(other.read(Buffer::zeroed(10)).await.expect("a read succeeds").1, 10);
        assert_eq!(world.now(), ten);
    });
}
