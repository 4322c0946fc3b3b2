//! One HTTP request and its answer.

use std::future::IntoFuture;
use std::pin::Pin;

use reqwest::header::HeaderMap;
use reqwest::{Method, RequestBuilder};
use serde_json::Value;

use super::gateway::{PASSWORD, USER};
use super::in_time;

/// A request that is about to be sent; `.await` sends it. The administrator asks, unless it says otherwise.
pub(crate) struct Call {
    request: RequestBuilder,
    name: String,
    credentials: Option<(String, String)>,
}

impl Call {
    pub(super) fn new(http: &reqwest::Client, method: &str, url: &str, path: &str) -> Self {
        Self {
            request: http.request(Method::from_bytes(method.as_bytes()).unwrap(), url),
            name: format!("{method} {path}"),
            credentials: Some((USER.to_owned(), PASSWORD.to_owned())),
        }
    }

    pub(crate) fn json(self, body: &Value) -> Self {
        self.body("application/json", body.to_string())
    }

    pub(crate) fn body(mut self, media_type: &str, body: impl Into<reqwest::Body>) -> Self {
        self.request = self.request.header("Content-Type", media_type).body(body);
        self
    }

    pub(crate) fn header(mut self, name: &str, value: &str) -> Self {
        self.request = self.request.header(name, value);
        self
    }

    pub(crate) fn user(mut self, user: &str, password: &str) -> Self {
        self.credentials = Some((user.to_owned(), password.to_owned()));
        self
    }

    pub(crate) fn anonymous(mut self) -> Self {
        self.credentials = None;
        self
    }

    /// The answer, or what went wrong on the way.
    pub(crate) async fn send(self) -> Result<Answer, reqwest::Error> {
        let request = match self.credentials {
            Some((user, password)) => self.request.basic_auth(user, Some(password)),
            None => self.request,
        };
        let response = request.send().await?;
        Ok(Answer {
            call: self.name,
            status: response.status().as_u16(),
            headers: response.headers().clone(),
            body: response.bytes().await?.to_vec(),
        })
    }
}

impl IntoFuture for Call {
    type Output = Answer;
    type IntoFuture = Pin<Box<dyn Future<Output = Answer> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        let name = self.name.clone();
        Box::pin(async move {
            in_time(&name, self.send()).await.unwrap_or_else(|error| panic!("{name}: there was no answer: {error:?}"))
        })
    }
}

/// What came back.
#[derive(Debug)]
pub(crate) struct Answer {
    call: String,
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    #[track_caller]
    pub(crate) fn expect(self, status: u16) -> Self {
        assert_eq!(self.status, status, "{}: {}", self.call, self.text());
        self
    }

    /// Expects the platform's error object with `status`, whose message holds `text`. Returns the message.
    #[track_caller]
    pub(crate) fn error(self, status: u16, text: &str) -> String {
        let answer = self.expect(status);
        let content_type = answer.header("content-type").unwrap_or_default();
        assert!(
            content_type.contains("application") && content_type.contains("json"),
            "{}: {content_type}",
            answer.call
        );
        let body = answer.json();
        for member in ["error", "message", "info"] {
            assert!(
                body[member].as_str().is_some_and(|text| !text.is_empty()),
                "{}: no {member} in {body}",
                answer.call
            );
        }
        let message = body["message"].as_str().unwrap().to_owned();
        assert!(message.contains(text), "{}: {text:?} is not in {message:?}", answer.call);
        message
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{}: {error} in {:?}", self.call, self.text()))
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }
}
