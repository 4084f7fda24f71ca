//! A request as it was read, and the answer to it.

pub(crate) struct Request {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) query: Vec<(String, String)>,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Request {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(its, _)| its.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }

    pub(crate) fn parameter(&self, name: &str) -> Option<&str> {
        self.query.iter().find(|(its, _)| its == name).map(|(_, value)| value.as_str())
    }
}

pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(&'static str, String)>,
    pub(crate) body: Vec<u8>,
    /// What the header says, where that is not the length of the body.
    pub(crate) said_len: Option<u64>,
}

impl Answer {
    pub(crate) fn of(status: u16) -> Self {
        Self { status, headers: Vec::new(), body: Vec::new(), said_len: None }
    }

    pub(crate) fn xml(status: u16, body: String) -> Self {
        Self {
            headers: vec![("Content-Type", "application/xml".to_owned())],
            body: body.into_bytes(),
            ..Self::of(status)
        }
    }

    pub(crate) fn error(status: u16, code: &str) -> Self {
        Self::xml(
            status,
            format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>{code}</Message></Error>"),
        )
    }
}
