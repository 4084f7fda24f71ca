//! Templates in a bucket of a server that is slow, or silent.

use std::collections::BTreeSet;
use std::time::Duration;

use futures_lite::future::block_on;
use futures_util::future::join_all;
use vellum_core::{Buffer, ErrorKind, ImageOffset, Random, Storage};
use vellum_remote::template::{Push, TemplateName, TemplateStorage};
use vellum_remote::{Put, Settings, Store};
use vellum_web::{Fault, Server, Speed};

/// Chunks of a template that are fetched at once.
const TURNS: usize = 16;

fn store(web: &Server, deadline: Duration) -> Store {
    let variables = [
        ("AWS_ENDPOINT_URL", web.url("")),
        ("AWS_REGION", "x".to_owned()),
        ("AWS_ACCESS_KEY_ID", "key".to_owned()),
        ("AWS_SECRET_ACCESS_KEY", "secret".to_owned()),
        ("AWS_SESSION_TOKEN", "token".to_owned()),
    ];
    let settings = Settings::from_vars(variables.map(|(name, value)| (name.to_owned(), value)));
    Store::open("s3://bucket/t", &settings.with_deadline(deadline, None)).expect("a bucket")
}

fn noise(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    Random::from_seed(7).fill(&mut bytes);
    bytes
}

fn name() -> TemplateName {
    TemplateName::split("s3://bucket/t/debian:1").expect("a name").1
}

async fn push(store: &Store, disk: &[u8], chunk_shift: u32) {
    let push = Push::begin(store, &name(), disk.len() as u64, chunk_shift).await.expect("begins");
    for (number, chunk) in (0..).zip(disk.chunks(1 << chunk_shift)) {
        push.add(number, chunk.to_vec()).await.expect("adds");
    }
    push.commit().await.expect("commits");
}

async fn read(template: &TemplateStorage, at: usize, len: usize) -> vellum_core::Result<Vec<u8>> {
    Ok(template.read(ImageOffset::new(at as u64), Buffer::for_overwrite(len)).await?.to_vec())
}

#[test]
fn a_slow_link_is_not_a_silent_one() {
    let web = Server::start();
    let disk = noise(1 << 20);
    block_on(async {
        let quick = store(&web, Duration::from_secs(60));
        push(&quick, &disk, 18).await;
        quick.put("large", disk[..600_000].to_vec().into(), Put::Replace).await.expect("written");
        // A chunk takes twice as long as nothing may come.
        web.set_speed(Speed { bytes_per_second: 128 << 10, ..Speed::default() });
        let patient = store(&web, Duration::from_secs(1));
        let template = TemplateStorage::open(&patient, &name(), None).await.expect("it is published");
        assert!(read(&template, 1 << 18, 1 << 18).await.expect("it comes") == disk[1 << 18..2 << 18]);
        assert!(patient.get("large", 600_000).await.expect("it comes") == disk[..600_000]);
    });
}

#[test]
fn reads_that_wait_for_a_turn_end_when_the_store_is_silent() {
    let web = Server::start();
    let disk = noise((4 * TURNS) << 16);
    block_on(async {
        push(&store(&web, Duration::from_secs(60)), &disk, 16).await;
        let patient = store(&web, Duration::from_secs(2));
        let template = TemplateStorage::open(&patient, &name(), None).await.expect("it is published");
        web.always(Fault::Stall);
        let reads = (0..4 * TURNS).map(|number| read(&template, number << 16, 4096));
        for read in join_all(reads).await {
            let error = read.expect_err("the store is silent");
            assert_eq!(error.kind(), ErrorKind::Io);
            assert!(error.chain().contains("did not answer within 2 s"), "{}", error.chain());
        }
        // The first ones were asked for, and others as the last try when those had ended. The rest waited no longer.
        let is_read = |path: &String| path.contains("/chunks/");
        let asked = web.log().into_iter().filter(|asked| asked.method == "GET").map(|asked| asked.path);
        let asked: BTreeSet<String> = asked.filter(is_read).collect();
        assert!((TURNS..=2 * TURNS).contains(&asked.len()), "{} chunks were asked for", asked.len());
        web.always(Fault::None);
        web.release();
        assert!(read(&template, 0, 4096).await.expect("it is well again") == disk[..4096]);
    });
}

#[test]
fn a_push_looks_whether_the_object_is_there_when_the_answer_is_lost() {
    let disk = noise(1 << 16);
    for fault in [Fault::Reset, Fault::Status(500), Fault::Stall] {
        let web = Server::start();
        let store = store(&web, Duration::from_secs(4));
        for part in ["/leases/", "/chunks/", "/index/"] {
            web.next_uploads(part, std::slice::from_ref(&fault));
        }
        block_on(async {
            let push = Push::begin(&store, &name(), disk.len() as u64, 16).await.expect("begins");
            push.add(0, disk.clone()).await.expect("it is there");
            let pushed = push.commit().await.expect("it is there");
            assert!(pushed.is_new && pushed.counts.uploaded == 1, "{fault:?}: {pushed:?}");
            let template = TemplateStorage::open(&store, &name(), None).await.expect("it is published");
            assert!(read(&template, 0, disk.len()).await.expect("it is whole") == disk, "{fault:?}");
        });
        let uploads = |part: &str| {
            let is_one = |asked: &&vellum_web::Asked| asked.method == "PUT" && asked.path.contains(part);
            web.log().iter().filter(is_one).count()
        };
        assert_eq!((uploads("/chunks/"), uploads("/index/")), (1, 1), "{fault:?}: nothing is sent again");
    }
}

#[test]
fn a_version_that_another_push_has_published_stays_although_an_answer_was_lost() {
    let (web, disk) = (Server::start(), noise(1 << 18));
    let store = store(&web, Duration::from_secs(60));
    block_on(async {
        let other = Push::begin(&store, &name(), 1 << 18, 18).await.expect("begins");
        other.add(0, vec![5; 1 << 18]).await.expect("adds");
        let push = Push::begin(&store, &name(), 1 << 18, 18).await.expect("begins");
        push.add(0, disk).await.expect("adds");
        let digest = other.commit().await.expect("it is the first").digest;
        web.next_uploads("/index/", &[Fault::Reset]);
        let error = push.commit().await.expect_err("there is another");
        assert!(error.chain().contains("never replaced"), "{}", error.chain());
        let template = TemplateStorage::open(&store, &name(), None).await.expect("it is published");
        assert_eq!(template.digest(), digest);
    });
}

#[test]
fn a_request_with_credentials_follows_no_redirect() {
    let (web, elsewhere) = (Server::start(), Server::start());
    web.put("/bucket/t/a", vec![1; 100]);
    elsewhere.put("/bucket/t/a", vec![2; 100]);
    let store = store(&web, Duration::from_secs(30));
    let (host, home) = (elsewhere.address().to_string(), web.address().to_string());
    for (to, named) in [
        (elsewhere.url("/bucket/t/a?X-Amz-Signature=hush"), host.as_str()),
        // Nor to itself: it is not the store that the request was signed for, or it is and need not say so.
        (web.url("/bucket/t/a"), home.as_str()),
        ("/bucket/t/a".to_owned(), "elsewhere"),
    ] {
        let redirect = [Fault::Redirect(to)];
        let before = web.counts().requests;
        block_on(async {
            let refused = |what: &str, error: vellum_core::Error| {
                let why = error.chain();
                let words = [named, "AWS_REGION", "AWS_ENDPOINT_URL"];
                assert!(
                    words.iter().all(|word| why.contains(word)) && !why.contains("hush"),
                    "{what}: {why}"
                );
                assert_eq!(error.kind(), ErrorKind::Invalid, "{what}");
            };
            web.next(&redirect);
            refused("get", store.get("a", 100).await.expect_err("it redirects"));
            web.next_others("HEAD", &redirect);
            refused("head", store.head("a").await.expect_err("it redirects"));
            web.next_others("GET", &redirect);
            refused("list", store.list("", 10).await.expect_err("it redirects"));
            web.next_others("POST", &redirect);
            refused("delete", store.delete(&["x".to_owned()]).await.expect_err("it redirects"));
            web.next_uploads("/b", &redirect);
            let put = store.put("b", vec![3; 10].into(), Put::Replace).await;
            refused("put", put.expect_err("it redirects"));
        });
        assert_eq!(web.counts().requests, before + 5, "nothing is asked again");
    }
    assert_eq!(elsewhere.counts().requests, 0, "and nothing of another host");
    assert_eq!(block_on(store.get("a", 100)).expect("it is well again"), vec![1; 100]);
}

#[test]
fn a_listing_and_a_deletion_whose_answers_break_off_are_asked_for_again() {
    let web = Server::start();
    for number in 0..3 {
        web.put(&format!("/bucket/t/chunks/{number}"), vec![1; 10]);
    }
    let store = store(&web, Duration::from_secs(30));
    block_on(async {
        web.next_others("GET", &[Fault::Short, Fault::Short]);
        let (found, is_all) = store.list("chunks", 10).await.expect("it is asked again");
        assert_eq!((found.len(), is_all), (3, true));
        web.next_others("POST", &[Fault::Short]);
        let keys: Vec<String> = found.into_iter().map(|facts| facts.key).collect();
        store.delete(&keys).await.expect("it is asked again");
    });
    assert_eq!(web.paths(), Vec::<String>::new());
    assert_eq!(web.counts().requests, 5);
    // One that never ends well is given up within the deadline, and says why.
    web.next_others("GET", &vec![Fault::Short; 100]);
    let quick = self::store(&web, Duration::from_secs(1));
    let error = block_on(quick.list("chunks", 10)).expect_err("it never ends well");
    assert_eq!(error.kind(), ErrorKind::Io, "{}", error.chain());
}
